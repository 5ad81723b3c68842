"""`multihead explore`: which model, then the server or the single file, and what to say about it."""

from pathlib import Path
from typing import Any

from rich.console import Console

from multihead.explorer.export import single_file, state_of
from multihead.explorer.session import Session
from multihead.explorer.subject import Subject
from multihead.explorer.subjects import of_name, of_package
from multihead.files import write_text
from multihead.models.store import NAMES


def launch(
    console: Console,
    *,
    model: str | None,
    text: str | None,
    sample: str | None,
    layer: int | None,
    save: Path | None,
    port: int | None,
    host: str,
    browser: bool,
) -> None:
    """Serve the explorer until Ctrl-C, or write its single file."""
    subjects = of_package()
    if model is not None and model not in NAMES:
        console.print(f"loading {model} …")
        subjects = [of_name(model), *subjects]
    session = Session(subjects)
    first = _chosen(session, subjects[0].id if model is None else model if model in NAMES else "model", text, sample)
    if model is not None and first[1] not in (model, "model"):
        given = f"text={text!r}" if sample is None else f"sample={sample!r}"
        raise ValueError(f"{given} is nothing that model={model!r} takes: leave one of them out")
    session.start_with(*first, layer)
    if save is not None:
        write_text(save, single_file(session, session.first))
        size = save.stat().st_size / 1e6
        console.print(f"wrote {save} ({size:.1f} MB): open it in a browser; it needs neither Python nor a network")
        return
    try:
        from multihead.explorer import serve
    except ImportError as error:
        raise ValueError(f'the explorer needs `pip install "multihead[explore]"`: {error}') from error
    if not serve.is_loopback(host):
        console.print(
            f"[bold red]warning:[/] at {host} others on the network can reach this server. Who has the token can use "
            "it, and nothing is encrypted.",
            soft_wrap=True,
        )
    session.prepare()

    def tell(url: str) -> None:
        console.print(f"the explorer is at {url}", soft_wrap=True)
        console.print("Ctrl-C ends it.")

    state = "" if (model, text, sample, layer) == (None,) * 4 else state_of(**session.first)
    serve.run(session, tell, host=host, port=port, browser=browser, state=state)
    console.print("ended.")


def _chosen(session: Session, model: str, text: str | None, sample: str | None) -> tuple[dict[str, Any] | None, str]:
    """What to open with: the input, and the model that takes it."""
    if text is not None and sample is not None:
        raise ValueError(f"text={text!r} and sample={sample!r}: expected one of them")
    kinds = {subject.id: subject.kind for subject in session.subjects.values()}
    kind = "text" if text is not None else "picture" if sample is not None else kinds[model]
    if kinds[model] != kind:
        model = _first_of(list(session.subjects.values()), kind)
    if text is not None:
        return {"kind": "text", "text": text}, model
    return (None if sample is None else {"kind": "sample", "name": sample}), model


def _first_of(subjects: list[Subject], kind: str) -> str:
    return next(subject.id for subject in subjects if subject.kind == kind)
