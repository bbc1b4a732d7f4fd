"""What the review says of a job, in whole sentences: one that does not fit is shortened or left to the question."""

from __future__ import annotations

import textwrap

from textual.widgets import Static

from sae_tui.jobs.launch.job_form import Review

_WITHOUT_LIMIT = 1000


class ReviewText(Static):
    """The summary, and what is wrong with the job, within the lines that its row leaves to it."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__("", markup=False, id=id)
        self._review = Review()

    def show_review(self, review: Review) -> None:
        self._review = review
        self._show()

    def on_resize(self) -> None:
        self._show()

    def _show(self) -> None:
        limit = self.parent.styles.max_height if self.parent else None
        n_lines = int(limit.value) if limit else _WITHOUT_LIMIT
        text = "\n".join(review_lines(self._review, max(20, self.content_size.width), n_lines))
        if text != str(self.content):
            self.update(text)


def review_lines(review: Review, width: int, n_lines: int) -> list[str]:
    """Return all of it where it fits; else every problem without its cure, or the first ones and how many more."""
    in_full = review.told
    for paragraphs in (in_full, [paragraph.partition("; ")[0] for paragraph in in_full]):
        wrapped = [textwrap.wrap(paragraph, width, break_on_hyphens=False) for paragraph in paragraphs]
        if sum(map(len, wrapped)) <= n_lines:
            return [line for lines in wrapped for line in lines]
    shown: list[str] = []
    for number, lines in enumerate(wrapped):
        if len(shown) + len(lines) > n_lines - 1:
            return [*shown, f"… {len(wrapped) - number} more; ctrl+l tells all"]
        shown += lines
    return shown
