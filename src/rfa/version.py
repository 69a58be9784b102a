"""The version of the package and the commit that it was made from.

It needs the standard library alone, so that the build can load it without PyTorch.
"""

import hashlib
import subprocess
from pathlib import Path

__version__ = "0.1.0"
NAME = "commit.txt"  # what the build writes into wheels and source distributions
_SOURCES = (".py", ".cpp", ".h")


def source_commit(package: Path) -> str | None:
    """The commit of a checkout, or of the one that the package was built in; None where neither is known.

    `-dirty` follows if the source differs from the commit.

    Args:
        package: the folder `rfa`, whose parent's parent is the checkout if there is one.
    """
    checkout = package.parents[1]
    if not (checkout / ".git").exists():  # git would report the commit of an unrelated repository around it
        try:
            return (package / NAME).read_text("utf-8").strip() or None
        except OSError:
            return None
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(checkout), *command], capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "src"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changes else head


def source_digest(package: Path) -> str | None:
    """A name for the files of the package, `files-` and 12 digits, for where no commit is known; None without files.

    Args:
        package: the folder `rfa`.
    """
    digest, read = hashlib.sha256(), 0
    for path in sorted(path for path in package.rglob("*") if path.suffix in _SOURCES):
        try:
            content = path.read_bytes()
        except OSError:  # a folder, or an editor's link to nowhere
            continue
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
        read += 1
    return f"files-{digest.hexdigest()[:12]}" if read else None
