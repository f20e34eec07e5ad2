"""Hugging Face Hub: downloads, the local cache, and uploads, by huggingface_hub.

The layout of the cache is models--OWNER--NAME/refs/REVISION, a text file with a commit, and
models--OWNER--NAME/snapshots/COMMIT.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.errors import ConfigError, WeightsError
from vit.text import format_megabytes, plural, printable, quoted

TIMEOUT = 5.0
"""Seconds until the first response of the hub."""
NAME_PATTERN = re.compile(r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class Repository:
    """A repository of the hub; `revision` is a branch, tag or commit, None for its main branch."""

    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Repository":
        """Parse OWNER/NAME or OWNER/NAME@REVISION."""
        match = NAME_PATTERN.fullmatch(text)
        if match is None or ".." in text or "--" in match["repo"]:
            raise WeightsError(
                f"{text} is no name on the Hugging Face Hub; write OWNER/NAME or "
                "OWNER/NAME@REVISION"
            )
        return cls(match["repo"], match["revision"])

    @property
    def url(self) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.name}"

    @property
    def cache(self) -> Path:
        """Folder of the repository in huggingface_hub's cache; it may not exist."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"models--{self.name.replace('/', '--')}"

    def fetch_command(self) -> str:
        """Shell command that downloads it on a machine with a network."""
        revision = f" --revision {quoted(self.revision)}" if self.revision else ""
        folder = quoted(self.name.rpartition("/")[2])
        return f"`hf download {self.name}{revision} --local-dir {folder}`"


def cached_snapshot(repository: Repository) -> Path | None:
    """Snapshot folder of `repository` in the cache, which may be partial; None if missing."""
    revision = repository.revision or "main"
    reference = repository.cache / "refs" / revision
    if reference.is_file():
        revision = reference.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"[\w-]+", revision):
        return None
    folder = repository.cache / "snapshots" / revision
    return folder if folder.is_dir() else None


def offline_reason(*, offline: bool | None) -> str | None:
    """Reason why the hub must not be used, by `offline` or else by HF_HUB_OFFLINE; None if it may
    be."""
    from huggingface_hub import constants

    if offline is None:
        return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else None
    return "this is an offline run" if offline else None


def unreachable_reason() -> str | None:
    """Reason why the hub cannot be reached, within seconds; None if it answers."""
    from huggingface_hub import constants, get_session

    try:
        # one request first: huggingface_hub retries each file six times, for half a minute
        answer = get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # of requests or httpx, depending on the version
        return f"{constants.ENDPOINT} cannot be reached ({_first_line(error)})"
    if answer.status_code in (407, 502, 503, 504):
        return f"{constants.ENDPOINT} cannot be reached (status {answer.status_code})"
    return None


def download(repository: Repository, choose: Callable[[Sequence[str]], Sequence[str]]) -> Path:
    """Snapshot folder of files of `repository` in the cache, downloaded unless already there."""
    from huggingface_hub import HfApi, hf_hub_download

    with _explain_errors(repository):
        info = HfApi().model_info(
            repository.name,
            revision=repository.revision,
            timeout=2 * TIMEOUT,
            files_metadata=True,
        )
        sizes = {file.rfilename: file.size for file in info.siblings or []}
        required = choose([*sizes])
        snapshot = repository.cache / "snapshots" / str(info.sha)
        if missing := [name for name in required if not (snapshot / name).exists()]:
            print(download_message(repository, [sizes[name] for name in missing]), file=sys.stderr)
        paths = [
            Path(hf_hub_download(repository.name, name, revision=repository.revision))
            for name in required
        ]
        folders = {path.parent for path in paths}
        if len(folders) != 1:
            raise WeightsError("it changed while it was fetched; try again")
        return folders.pop()


def download_message(repository: Repository, sizes: Sequence[int | None]) -> str:
    """Line printed before a download: source, number of files, size, destination."""
    known = sum(size or 0 for size in sizes)
    size = format_megabytes(known) if known else "of a size that the hub does not say"
    files = plural(len(sizes), "file")
    return printable(f"downloading {repository.url}: {files}, {size}, to {repository.cache}")


@contextlib.contextmanager
def _explain_errors(repository: Repository) -> Iterator[None]:
    """Convert errors of huggingface_hub to WeightsError with a reason of one line."""
    from huggingface_hub import errors

    try:
        yield
        return
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {repository.revision}"
    except errors.RepositoryNotFoundError:  # or it is gated
        reason = (
            f"there is no {repository.url} for you: accept its terms there, and `hf auth login` on "
            "this machine, if it is gated or private"
        )
    except WeightsError:
        raise
    except Exception as error:  # network and disk, in the kinds of several libraries
        cause: Any = error.__cause__ or error
        reason = f"fetching failed ({_first_line(cause)})"
    raise WeightsError(reason) from None


def _first_line(error: object) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]


def check_repository_name(name: str) -> None:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ConfigError(f"push={name!r}: write OWNER/NAME, such as ada/pets-vit")


def push_to_hub(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload the files of `folder` to the repository `name`, created if missing; returns its
    URL."""
    from huggingface_hub import HfApi, errors

    reason = offline_reason(offline=None) or unreachable_reason()
    if reason is None:
        try:
            api = HfApi()
            address = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by vit")
        except errors.LocalTokenNotFoundError:
            reason = "there is no login: run `hf auth login` first"
        except Exception as error:  # network, rights and quota, in the kinds of several libraries
            reason = _first_line(error.__cause__ or error)
        else:
            return str(address)
    raise WeightsError(
        f"{folder} is written, but was not pushed to {name}: {reason}; "
        f"later: `hf upload {quoted(name)} {quoted(folder)}`"
    )
