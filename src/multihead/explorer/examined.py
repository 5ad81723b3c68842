"""`multihead doctor --explore`: one's own implementation beside the specification, on the page."""

from typing import Any

from rich.console import Console

from multihead.doctor.exhibit import exhibit
from multihead.doctor.load import NotLoaded
from multihead.doctor.report import Report
from multihead.doctor.run import prepared
from multihead.explorer.compare import of_exhibit
from multihead.explorer.session import Session
from multihead.explorer.subjects import of_model


def examined(given: dict[str, Any], report: Report) -> Session:
    """A session on what the doctor's command line examined; it has come to an end in a process of its own before."""
    try:
        (candidate, _, x, context, mask), options = prepared(given)
    except NotLoaded as problem:
        raise ValueError(str(problem)) from problem
    shown = exhibit(candidate, None, x, context, mask, **options)
    layer = shown.layer()
    if layer is None:
        raise ValueError(
            "it cannot be shown beside the seven steps: its weights, or how to call it, are not understood"
        )
    call = {"mask": mask} | ({} if context is None else {"context": context.float()})
    session = Session([of_model(layer, x.float(), **call)[0]])
    session.pair = of_exhibit(shown, report, given["target"].partition(":")[2])
    return session


def serve_examined(given: dict[str, Any], report: Report, console: Console) -> None:
    """`multihead doctor --explore`: serve it until Ctrl-C."""
    try:
        from multihead.explorer import serve
    except ImportError as error:
        raise ValueError(f'--explore needs `pip install "multihead[explore]"`: {error}') from error

    def tell(url: str) -> None:
        console.print(f"side by side at {url}", soft_wrap=True)
        console.print("Ctrl-C ends it.")

    serve.run(examined(given, report), tell, host=serve.LOOPBACK, port=None, browser=True)
