"""Files of the Hugging Face Hub: from its cache on this disk, or fetched into it.

huggingface_hub does the fetching; the layout of its cache is
models--OWNER--NAME/refs/REVISION, a text with a commit, and models--OWNER--NAME/snapshots/COMMIT.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.errors import ConfigError, WeightsError, printable, quoted

SECONDS = 5.0
"""How long the hub may take for its first answer."""
NAME_PATTERN = re.compile(r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class Repository:
    """A repository of the hub.

    Args:
        name: OWNER/NAME.
        revision: A branch, tag or commit; None for its main branch.
    """

    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Repository":
        """The repository called OWNER/NAME or OWNER/NAME@REVISION.

        Raises:
            WeightsError: `text` has another form.
        """
        match = NAME_PATTERN.fullmatch(text)
        if match is None or ".." in text or "--" in match["repo"]:
            raise WeightsError(
                f"{printable(text)} is no name on the Hugging Face Hub; write OWNER/NAME or "
                "OWNER/NAME@REVISION"
            )
        return cls(match["repo"], match["revision"])

    @property
    def url(self) -> str:
        """Its page."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.name}"

    @property
    def cache(self) -> Path:
        """Where huggingface_hub keeps it on this disk; there may be nothing."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"models--{self.name.replace('/', '--')}"

    def fetch_command(self) -> str:
        """What to type on a machine with a network."""
        revision = f" --revision {quoted(self.revision)}" if self.revision else ""
        folder = quoted(self.name.rpartition("/")[2])
        return f"`hf download {self.name}{revision} --local-dir {folder}`"


def cached(repository: Repository) -> Path | None:
    """The folder of the cache with the files of `repository`, as many as were fetched."""
    revision = repository.revision or "main"
    reference = repository.cache / "refs" / revision
    if reference.is_file():
        revision = reference.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"[\w-]+", revision):
        return None
    folder = repository.cache / "snapshots" / revision
    return folder if folder.is_dir() else None


def offline_reason(*, offline: bool | None) -> str | None:
    """Why the hub is not to be asked; None where it may be.

    Args:
        offline: Whether to leave it alone; None follows HF_HUB_OFFLINE.
    """
    from huggingface_hub import constants

    if offline is None:
        return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else None
    return "this is an offline run" if offline else None


def unreachable_reason() -> str | None:
    """Why the hub cannot be asked, found in seconds; None where it answers."""
    from huggingface_hub import constants, get_session

    try:
        # one short question first: huggingface_hub tries each file six times, for half a minute
        answer = get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # of requests, httpx or httpx2, as its version has it
        return f"{constants.ENDPOINT} cannot be reached ({_first_line(error)})"
    if answer.status_code in (407, 502, 503, 504):
        return f"{constants.ENDPOINT} cannot be reached (status {answer.status_code})"
    return None


def download(repository: Repository, choose: Callable[[Sequence[str]], Sequence[str]]) -> Path:
    """Fetch files of `repository` into the cache, except those that are there already.

    What is about to be fetched is announced on standard error, with its size.

    Args:
        repository: Where they are.
        choose: From the names of all files of a repository, those that are needed.

    Returns:
        The folder they are in.

    Raises:
        WeightsError: It is not there, closed, or the network broke; one reason, without places.
    """
    from huggingface_hub import HfApi, hf_hub_download

    def ask() -> Path:
        info = HfApi().model_info(
            repository.name,
            revision=repository.revision,
            timeout=2 * SECONDS,
            files_metadata=True,
        )
        sizes = {file.rfilename: file.size for file in info.siblings or []}
        wanted = choose([*sizes])
        here = repository.cache / "snapshots" / str(info.sha)
        if missing := [name for name in wanted if not (here / name).exists()]:
            print(download_message(repository, [sizes[name] for name in missing]), file=sys.stderr)
        paths = [
            Path(hf_hub_download(repository.name, name, revision=repository.revision))
            for name in wanted
        ]
        folders = {path.parent for path in paths}
        if len(folders) != 1:
            raise WeightsError("it changed while it was fetched; try again")
        return folders.pop()

    return _explained(ask, repository)


def download_message(repository: Repository, sizes: Sequence[int | None]) -> str:
    """The line before a download: from where, how much, to where.

    Args:
        repository: Where the files are.
        sizes: Of each file in bytes; None where the hub does not say.
    """
    known = sum(size or 0 for size in sizes)
    size = f"{known / 1e6:,.1f} MB" if known else "of a size that the hub does not say"
    files = f"{len(sizes)} file{'s' * (len(sizes) != 1)}"
    return printable(f"downloading {repository.url}: {files}, {size}, to {repository.cache}")


def _explained(ask: Callable[[], Path], repository: Repository) -> Path:
    """The answer of `ask`, with what the hub's errors mean."""
    from huggingface_hub import errors

    try:
        return ask()
    except errors.GatedRepoError:
        reason = (
            f"it is gated: accept its terms at {repository.url}, then `hf auth login` on this "
            "machine"
        )
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {printable(repository.revision)}"
    except errors.RepositoryNotFoundError:
        reason = "the hub has no such repository, or a private one: `hf auth login` opens yours"
    except WeightsError:
        raise
    except Exception as error:  # network and disk, in the kinds of several libraries
        cause: Any = error.__cause__ or error
        reason = f"fetching failed ({_first_line(cause)})"
    raise WeightsError(reason) from None


def _first_line(error: object) -> str:
    text = str(error).strip() or type(error).__name__
    return printable(text.splitlines()[0])[:160]


def check_repository_name(name: str) -> None:
    """Refuse what is no name of a repository.

    Raises:
        ConfigError: It is not OWNER/NAME.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ConfigError(f"push={name!r}: write OWNER/NAME, such as ada/pets-vit")


def push_to_hub(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload the files of `folder` to the repository `name`, which is made if it is not there.

    Returns:
        Its address.

    Raises:
        WeightsError: Nobody is logged in, the repository is closed, or the network broke.
    """
    from huggingface_hub import HfApi, errors

    reason = offline_reason(offline=None) or unreachable_reason()
    if reason is None:
        try:
            api = HfApi()
            address = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by vit")
        except errors.LocalTokenNotFoundError:
            reason = "nobody is logged in: `hf auth login` first"
        except Exception as error:  # network, rights and quota, in the kinds of several libraries
            reason = _first_line(error.__cause__ or error)
        else:
            return str(address)
    raise WeightsError(
        f"{printable(folder)} is written, but was not pushed to {printable(name)}: {reason}; "
        f"later: `hf upload {quoted(name)} {quoted(folder)}`"
    )
