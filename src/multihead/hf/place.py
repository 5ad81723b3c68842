"""Where a Hugging Face model is: a folder, a GGUF file or a name on the hub; and why it was not found there."""

from pathlib import Path
from typing import Any


def place(name: str) -> dict[str, Any]:
    """What `from_pretrained` is called with.

    >>> from multihead.hf.place import place
    >>> place("openai-community/gpt2")
    {'pretrained_model_name_or_path': 'openai-community/gpt2'}
    """
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name):
        raise FileNotFoundError(f"model={name!r}: there is no such folder")
    return {"pretrained_model_name_or_path": name}


def refusal(name: str, error: Exception) -> ValueError:
    """Why a model was not loaded: in our words where nothing of that name is here and the hub was not reached."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError

    behind: BaseException | None = error
    while behind is not None and not Path(name).exists():
        if isinstance(behind, LocalEntryNotFoundError | OfflineModeIsEnabled):
            return ValueError(
                f"model={name!r}: there is no such folder here, no such model among those already downloaded, and the "
                "hub could not be asked, for there is no network: expected lm, vit, a folder, a GGUF file, or a name "
                "on the hub"
            )
        if isinstance(behind, RepositoryNotFoundError):
            return ValueError(
                f"model={name!r}: there is no such folder here, and no model of that name on the hub that may be read"
            )
        behind = behind.__cause__ or behind.__context__
    return ValueError(f"model={name!r}: transformers cannot load it: {error}")
