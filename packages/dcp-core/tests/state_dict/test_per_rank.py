"""Per-rank values in the containers of a state dict."""

import pytest

from dcp_core.state_dict.per_rank import PerRank, RankValues, rank_places, with_rank_values


def test_a_save_copies_only_what_it_changes():
    inner = {"a": PerRank(1), "b": [2, PerRank({"c": 3})]}
    plain = {"d": [4]}
    state = {"x": inner, "y": plain, "z": PerRank(5)}
    made = with_rank_values(state, 7)
    assert made == {"x": {"a": {"rank_7": 1}, "b": [2, {"rank_7": {"c": 3}}]}, "y": plain, "z": {"rank_7": 5}}
    assert made["y"] is plain
    assert isinstance(inner["a"], PerRank)
    assert with_rank_values(plain, 7) is plain


@pytest.mark.parametrize(
    ("rank", "otherwise", "stands", "taken"),
    [
        (1, "keep", {"rank_1": "old"}, 1),
        (5, "keep", {}, None),
        (5, "modulo", {"rank_2": "old"}, 2),
    ],
)
def test_a_load_takes_the_ranks_own_value(rank, otherwise, stands, taken):
    value = PerRank("old", otherwise=otherwise)
    template = {"a": [{"rng": value}]}
    values = RankValues(
        rank_places(template), {f"a.0.rng.rank_{n}" for n in range(3)} | {"a.0.rng.rank_x", "a.0.rng_"}, rank, 6
    )
    assert template == {"a": [{"rng": stands}]}
    assert values.taken == {"a.0.rng": taken}
    if stands:
        template["a"][0]["rng"][f"rank_{taken}"] = "new"
    values.restore()
    values.restore()
    assert template["a"][0]["rng"] is value
    assert value.value == ("new" if stands else "old")


@pytest.mark.parametrize(
    ("names", "stands"), [({"rng"}, "old"), ({"rng.deeper"}, "old"), ({"other"}, {"rank_0": "old"})]
)
def test_one_value_for_all_and_none_at_all(names, stands):
    template = {"rng": PerRank("old")}
    values = RankValues(rank_places(template), names, 0, 6)
    assert template == {"rng": stands}
    if stands == "old":
        template["rng"] = "new"
    values.restore()
    assert template["rng"].value == ("new" if stands == "old" else "old")


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match="'keep', 'modulo' or 'error'"):
        PerRank(1, otherwise="first")


class Part:
    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state_dict):
        self.at = state_dict["at"]


@pytest.mark.parametrize("names", [{"p.rank_0"}, {"p"}])
def test_stateful_values_give_and_take_their_state(names):
    assert with_rank_values({"p": PerRank(Part(4))}, 0) == {"p": {"rank_0": ({"at": 4},)}}
    part = Part(1)
    template = {"p": PerRank(part)}
    values = RankValues(rank_places(template), names, 0, 6)
    loaded = ({"at": 9},)
    template["p"] = loaded if names == {"p"} else {"rank_0": loaded}
    values.restore()
    assert part.at == 1
    values.apply()
    assert part.at == 9
    assert template["p"].value is part


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_value_can_refuse_another_number_of_ranks(world_size):
    names = {f"loader.rank_{rank}.position" for rank in range(3)} | {"shared"}
    template = {"loader": PerRank(1, otherwise="error"), "shared": PerRank(2, otherwise="error")}
    values = RankValues(rank_places(template), names, 0, world_size)
    assert [*values.refused] == ([] if world_size == 3 else ["loader"])
    if world_size != 3:
        assert f"a value per rank, saved by 3 ranks, and this job has {world_size}:" in values.refused["loader"]
