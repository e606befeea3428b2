"""The progress bar of `LLM.generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minilora.engine.request import Request


@contextmanager
def progress_bar(groups: Sequence[Sequence[Request]], shown: bool) -> Iterator[Callable[[], None]]:
    """Show finished prompts and tokens on a terminal's stderr; yield what updates it."""
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield lambda: None
        return
    columns = (
        TextColumn("Answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts, {task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(groups), tokens=0)

        def advance() -> None:
            done = sum(all(answer.finished for answer in group) for group in groups)
            tokens = sum(len(answer.output_token_ids) for group in groups for answer in group)
            bar.update(task, completed=done, tokens=tokens)

        yield advance
