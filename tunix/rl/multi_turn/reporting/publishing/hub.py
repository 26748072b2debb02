"""Pushes a folder to the Hugging Face Hub by its own client.

The address is HF_ENDPOINT's, the token HF_TOKEN's or that of `hf auth login`,
unless one is given. `huggingface_hub` waits without end for a silent server;
here each wait has a deadline. Contents go by LFS: the client of Xet, its other
protocol, is a compiled program that no deadline ends and that commits a folder
in parts; by LFS a push is one commit, all of it or nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from typing import Any, Iterator, Literal, Sequence

from tunix.rl.multi_turn.net import credentials

STALL_S = 60.0
"""That the Hub may be silent, in seconds."""


class PublishError(ValueError):
  """Something that cannot be published, and what to do about it."""


@dataclasses.dataclass(frozen=True)
class Target:
  """A repository.

  Attributes:
    repo: owner/name, or a name of the token's user.
    kind: model or dataset.
    private: whether a new repository is; None: as the owner's default. True
      refuses one that exists and is public.
    token: None: as the client finds it.
  """

  repo: str
  kind: Literal["model", "dataset"]
  private: bool | None = None
  token: str | None = dataclasses.field(default=None, repr=False)


def check_name(name: str, field: str = "repo") -> None:
  """Raises PublishError unless `name` is a repository's."""
  from huggingface_hub import errors  # pylint: disable=g-import-not-at-top,g-multiple-import
  from huggingface_hub import utils  # pylint: disable=g-import-not-at-top,g-multiple-import

  try:
    utils.validate_repo_id(name)
  except errors.HFValidationError as error:
    raise PublishError(
      f"{field} is {name!r}, which is no name of a repository; give"
      f" owner/name ({error})"
    ) from None


def check(target: Target) -> None:
  """Checks a target without asking the Hub; raises PublishError."""
  import huggingface_hub  # pylint: disable=g-import-not-at-top
  from huggingface_hub import constants  # pylint: disable=g-import-not-at-top

  check_name(target.repo)
  if constants.is_offline_mode():
    raise PublishError(
      "HF_HUB_OFFLINE is set, so nothing can be pushed; unset it, or write a"
      " folder instead"
    )
  if not (target.token or huggingface_hub.get_token()):
    raise PublishError(
      "there is no token for the Hub; set HF_TOKEN to one that may write, or"
      " run: hf auth login"
    )


def push(
  folder: str | pathlib.Path,
  target: Target,
  message: str,
  replaces: Sequence[str] = (),
  stall_s: float = STALL_S,
) -> str:
  """Makes the repository where it is absent, and commits the folder to it.

  Args:
    folder: all its files are sent; those that the repository has already are
      not sent again.
    target: the repository.
    message: Message of the commit.
    replaces: patterns of files that are deleted there unless the folder has
      them. All others stay.
    stall_s: Seconds that the Hub may be silent.

  Returns:
    the address of the repository.

  Raises:
    PublishError: the Hub refuses, or does not answer.
  """
  import httpx  # pylint: disable=g-import-not-at-top
  import huggingface_hub  # pylint: disable=g-import-not-at-top
  from huggingface_hub import errors  # pylint: disable=g-import-not-at-top

  check(target)
  api = huggingface_hub.HfApi(token=target.token)
  where = f"{target.repo} at {credentials.masked(api.endpoint)}"
  try:
    with _deadlines(stall_s):
      url = api.create_repo(
        target.repo,
        repo_type=target.kind,
        private=target.private,
        exist_ok=True,
      )
      info = api.repo_info(url.repo_id, repo_type=target.kind)
      if target.private and not info.private:
        raise PublishError(
          f"{where} exists and is public; make it private there, give another"
          " name, or ask for no private one"
        )
      api.upload_folder(
        folder_path=str(folder),
        repo_id=url.repo_id,
        repo_type=target.kind,
        commit_message=message,
        delete_patterns=list(replaces) or None,
      )
  except PublishError:
    raise
  except errors.HfHubHTTPError as error:
    raise PublishError(_refusal(where, error)) from error
  except (httpx.TransportError, errors.OfflineModeIsEnabled, OSError) as error:
    raise PublishError(_silence(where, error)) from error
  except (ValueError, RuntimeError) as error:  # RuntimeError: a file of it.
    if isinstance(error.__cause__, httpx.TransportError):
      raise PublishError(_silence(where, error.__cause__)) from error
    cause = credentials.masked(f"{error.__cause__ or error}")
    raise PublishError(f"{where} did not take it: {cause}") from error
  return credentials.masked(str(url))


def _silence(where: str, error: Exception) -> str:
  text = credentials.masked(f"{error}") or type(error).__name__
  return (
    f"{where} does not answer: {text}; try again, or write a folder instead"
  )


def _refusal(where: str, error: Any) -> str:
  status = error.response.status_code
  text = error.server_message or f"HTTP {status}"
  if status == 401:
    return (
      f"{where} does not know the token ({text}); set HF_TOKEN, or run: hf"
      " auth login"
    )
  if status in (403, 404):
    return (
      f"{where} may not be written with this token ({text}); give a token"
      " that may write there, or another name"
    )
  return f"{where} refused: {text}"


@contextlib.contextmanager
def _deadlines(stall_s: float) -> Iterator[None]:
  """Ends requests of the client when the server is silent for `stall_s`.

  A content is asked for up to six times, so a push to a Hub that falls silent
  in the middle ends after six times as long.
  """
  import httpx  # pylint: disable=g-import-not-at-top
  import huggingface_hub  # pylint: disable=g-import-not-at-top
  from huggingface_hub import constants  # pylint: disable=g-import-not-at-top
  from huggingface_hub.utils import _http  # pylint: disable=g-import-not-at-top

  before = _http._GLOBAL_CLIENT_FACTORY  # pylint: disable=protected-access

  def make() -> httpx.Client:
    client = before()
    client.timeout = httpx.Timeout(stall_s)
    return client

  huggingface_hub.set_client_factory(make)
  xet_was_off = constants.HF_HUB_DISABLE_XET
  constants.HF_HUB_DISABLE_XET = True  # Read by the client at each upload.
  try:
    yield
  finally:
    constants.HF_HUB_DISABLE_XET = xet_was_off
    huggingface_hub.set_client_factory(before)
