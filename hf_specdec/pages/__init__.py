"""A call as one HTML file: every token coloured by who produced it, round by round."""

from hf_specdec.pages.page import page, write_page
from hf_specdec.pages.run import Run

__all__ = ["Run", "page", "write_page"]
