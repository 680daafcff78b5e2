"""Copies of packages as a release builds them: with the project's addresses, and READMEs whose links work anywhere.

The repository does not know where it will be published, and a README that links `../../docs` is right in a clone and
on the site only. So the address comes from outside, and what has none of it is built without links.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

__all__ = ["ADDRESS_VARIABLE", "repository_address", "stage"]

ADDRESS_VARIABLE = "DCP_REPOSITORY"
_REMOTE = re.compile(r"(?:https://|(?:ssh://)?git@)(?:[^@/]*@)?([\w.-]+)[:/]([\w./-]+?)(?:\.git)?/?")
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")
_URLS = """
[project.urls]
Homepage = "{address}"
Repository = "{address}"
Documentation = "{address}/blob/v{version}/docs/index.md"
Changelog = "{address}/blob/v{version}/packages/{name}/CHANGELOG.md"
Issues = "{address}/issues"
"""


def repository_address(root: Path) -> str | None:
    """Return the web address of the repository: `DCP_REPOSITORY`, else that of the remote `origin`; None without both.

    A remote that is no web address, such as a folder, counts as none.
    """
    if said := os.environ.get(ADDRESS_VARIABLE):
        return said.rstrip("/")
    asked = ("git", "-C", str(root), "config", "--get", "remote.origin.url")
    remote = subprocess.run(asked, check=False, capture_output=True, text=True).stdout.strip()
    found = _REMOTE.fullmatch(remote)
    return f"https://{found[1]}/{found[2]}" if found else None


def stage(root: Path, name: str, version: str, into: Path, address: str | None) -> Path:
    """Copy a package's files that git knows or does not ignore, with addresses in place of relative links.

    Args:
        root: The root of the repository.
        name: The package, such as `dcp-core`.
        version: Version, whose tag `v{version}` the links show.
        into: The folder that gets the copy, as `packages/{name}`.
        address: Web address of the repository; None leaves out `[project.urls]`, and links lose their targets.

    Returns:
        The folder of the copy.
    """
    package = Path("packages") / name
    listed = ("git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", str(package))
    files = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    for file in filter(None, files):
        if (root / file).exists():  # a file that was removed stays listed until the next commit
            (into / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / file, into / file)
    readme, project = into / package / "README.md", into / package / "pyproject.toml"
    readme.write_text(_with_absolute_links(readme.read_text(), root, package, version, address))
    if address is not None:
        with project.open("a") as appended:
            appended.write(_URLS.format(address=address, version=version, name=name))
    return into / package


def _with_absolute_links(text: str, root: Path, package: Path, version: str, address: str | None) -> str:
    def absolute(link: re.Match[str]) -> str:
        shown, target, anchor = link.groups()
        if address is None:
            return shown
        path = Path(os.path.normpath(package / target))
        if not (root / path).exists():
            raise FileNotFoundError(f"{package / 'README.md'} links {target}, which does not exist")
        return f"[{shown}]({address}/{'tree' if (root / path).is_dir() else 'blob'}/v{version}/{path}{anchor or ''})"

    return _LINK.sub(absolute, text)
