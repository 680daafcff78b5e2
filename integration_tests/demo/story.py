"""The stages of the demo, in order: train, be killed in the middle of a save, resume on 2, 4 and 1 ranks, real weights.

Each stage is one job of fresh processes; what it reports is compared here, outside the job.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from integration_tests.demo.kill import MidSaveKiller
from integration_tests.demo.launch import Job
from integration_tests.demo.results import Check, Curve, Results, Timing
from integration_tests.demo.screen import Screen

__all__ = ["run"]

STEPS = 16
GOOD_SAVES = (5, 10)
DOOMED_SAVE = 14
LOSS_TOLERANCE = 1e-5
KILL_ATTEMPTS = 3


def run(folder: Path, screen: Screen) -> Results:
    """Every stage.

    Args:
        folder: an empty folder for checkpoints and logs.
        screen: shows the progress.

    Raises:
        JobFailedError: a rank ended with an error that the story does not want.
    """
    results = Results(saved_at=GOOD_SAVES[-1], killed_at=DOOMED_SAVE)
    checkpoint = folder / "checkpoint"
    truth = _losses(_train(folder, screen, "train on 2 ranks, uninterrupted", 2, steps=STEPS, checkpoint=checkpoint))
    results.curves.append(Curve("uninterrupted, 2 ranks", truth))
    saved, debris = _killed(folder, screen, checkpoint, results)
    stages: tuple[tuple[int, dict[str, Any]], ...] = (
        (2, {"bench": str(folder / "train-bench")}),
        (4, {}),
        (1, {"save_at": [STEPS]}),
    )
    for world_size, extra in stages:
        name = f"resume on {world_size} rank{'s' * (world_size > 1)}"
        options = {"steps": STEPS, "checkpoint": checkpoint, "resume": True, **extra}
        events = _train(folder, screen, name, world_size, **options)
        _judge_resume(name, events, saved, truth, results)
        _add_timings(f"training state, {world_size} ranks", events, results)
    left = debris & {path.name for path in checkpoint.iterdir()}
    text = f"{len(debris) - len(left)} of {len(debris)} files of the killed save removed"
    results.checks.append(Check("the next save cleans up", text, not left))
    _weights(folder, screen, results)
    return results


def _train(folder: Path, screen: Screen, name: str, world_size: int, **options: Any) -> list[dict[str, Any]]:
    """One training job to its end; the events of rank 0."""
    total = STEPS - (GOOD_SAVES[-1] if options.get("resume") else 0)
    options["checkpoint"] = str(options["checkpoint"])
    with screen.stage(name, total) as stage, Job("train", world_size, folder / "logs" / name, **options) as job:
        events = []
        for event in job.events():
            if event["rank"] == 0:
                stage.show(event)
                events.append(event)
        job.wait()
    return events


def _killed(folder: Path, screen: Screen, checkpoint: Path, results: Results) -> tuple[dict[str, str], set[str]]:
    """The job that dies; the hashes of what its last good save held, and the files that the killed save left."""
    options = {"steps": STEPS, "checkpoint": str(checkpoint), "save_at": [*GOOD_SAVES, DOOMED_SAVE]}
    for attempt in range(KILL_ATTEMPTS):
        logs = folder / "logs" / f"killed {attempt}"
        saved: dict[str, str] = {}
        losses: dict[int, float] = {}
        survivor = "the launcher ended the other rank"
        with (
            screen.stage("train on 2 ranks, killed in a save", DOOMED_SAVE) as stage,
            Job("train", 2, logs, **options) as job,
        ):
            killer = MidSaveKiller(job, checkpoint, victim=1)
            for event in job.events():
                if event["event"] == "failed" and killer.struck_at is not None:
                    survivor = f"the other rank raised in {time.monotonic() - killer.struck_at:.1f} s"
                if event["rank"] != 0:
                    continue
                stage.show(event)
                losses.update(_losses([event]))
                if event["event"] == "saved" and event["steps_done"] == GOOD_SAVES[-1]:
                    saved = event["fingerprints"]
                    killer.arm()
            if killer.struck_at is None:
                job.wait()
        if killer.hit_in_time():
            break
    results.curves.append(Curve(f"killed in the save of step {DOOMED_SAVE}", losses))
    promise = f"SIGKILL in the save of step {DOOMED_SAVE}"
    text = f"still the index of step {GOOD_SAVES[-1]}; {survivor}"
    results.checks.append(Check(promise, text, killer.hit_in_time()))
    return saved, killer.debris()


def _judge_resume(
    name: str, events: list[dict[str, Any]], saved: dict[str, str], truth: dict[int, float], results: Results
) -> None:
    restored = next(event for event in events if event["event"] == "restored")
    found = restored["fingerprints"]
    equal = sum(found.get(key) == right for key, right in saved.items())
    losses = _losses(events)
    worst = max(abs(loss - truth[step]) for step, loss in losses.items())
    same_world = name == "resume on 2 ranks"
    results.curves.append(Curve(name, losses))
    text = f"{equal} of {len(saved)} tensors bit-equal"
    results.checks.append(Check(f"{name}: state", text, found == saved and restored["steps_done"] == GOOD_SAVES[-1]))
    text = (
        f"{len(losses)} losses bit-equal" if worst == 0 else f"largest difference of {len(losses)} losses {worst:.1e}"
    )
    kept = len(losses) == STEPS - GOOD_SAVES[-1] and worst <= (0.0 if same_world else LOSS_TOLERANCE)
    results.checks.append(Check(f"{name}: losses", text, kept))


def _weights(folder: Path, screen: Screen, results: Results) -> None:
    bench = str(folder / "weights-bench")
    for task, world_size, verb in (("save_weights", 4, "save"), ("load_weights", 3, "load")):
        name = f"MiniLM weights: {verb} on {world_size} ranks"
        with screen.stage(name, 1) as stage, Job(task, world_size, folder / "logs" / task, bench=bench) as job:
            events = [event for event in job.events() if event["rank"] == 0]
            job.wait()
            stage.show({"event": "step"})
        _add_timings(f"MiniLM, {world_size} ranks", events, results)
        for event in events:
            if event["event"] == "compared":
                promise = f"MiniLM 4 → 3 ranks: {event['writer']} wrote, {event['reader']} read"
                text = f"{event['equal']} of {event['tensors']} tensors bit-equal"
                results.checks.append(Check(promise, text, event["equal"] == event["tensors"]))


def _add_timings(what: str, events: list[dict[str, Any]], results: Results) -> None:
    for event in events:
        if event["event"] == "times":
            verb = event["operation"].removeprefix("time_").removesuffix("s")
            seconds = {each["library"]: each["seconds"] for each in event["times"]}
            sizes = {each["library"]: each["checkpoint_bytes"] for each in event["times"]}
            results.timings.append(Timing(f"{verb} {what}", seconds, sizes))


def _losses(events: list[dict[str, Any]]) -> dict[int, float]:
    return {event["steps_done"]: event["loss"] for event in events if event["event"] == "step"}
