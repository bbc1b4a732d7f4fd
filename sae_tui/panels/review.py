"""The text of a review in complete sentences.

If it does not fit, sentences are shortened or the last ones are omitted.
"""

from __future__ import annotations

import textwrap

from textual.widgets import Static

from sae_tui.jobs.launch.job_form import Review

_WITHOUT_LIMIT = 1000


class ReviewText(Static):
    """The summary and the problems of the job, within the lines available in its row."""

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
    """Return the review in full if it fits, else without remedies, else the first problems and a count of the rest."""
    in_full = review.sentences
    for paragraphs in (in_full, [paragraph.partition("; ")[0] for paragraph in in_full]):
        wrapped = [textwrap.wrap(paragraph, width, break_on_hyphens=False) for paragraph in paragraphs]
        if sum(map(len, wrapped)) <= n_lines:
            return [line for lines in wrapped for line in lines]
    shown: list[str] = []
    for number, lines in enumerate(wrapped):
        if len(shown) + len(lines) > n_lines - 1:
            return [*shown, f"… {len(wrapped) - number} more; ctrl+l shows all"]
        shown += lines
    return shown
