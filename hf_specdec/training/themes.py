"""What the target writes prompts about, unless the user says otherwise."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from hf_specdec.rows import file_rows, parsed
from hf_specdec.training.examples import readable


@dataclass(frozen=True)
class Theme:
    """Steers the prompts a target writes itself.

    Args:
        system: the system message they are written under; empty for the chat template's own.
        beginnings: how the user's message may begin; the target writes the rest. Without any it writes all.
    """

    system: str = ""
    beginnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        is_list = isinstance(self.beginnings, list | tuple) and all(isinstance(text, str) for text in self.beginnings)
        if not isinstance(self.system, str) or not is_list:
            raise ValueError(f"A theme has a text `system` and a list of texts `beginnings`, not {self!r}.")
        object.__setattr__(self, "beginnings", tuple(self.beginnings))


def read_themes(path: str | os.PathLike[str]) -> tuple[Theme, ...]:
    """Reads themes from JSON lines with `system`, `beginnings` or both. Broken lines are shown and left out.

    Raises:
        ValueError: if no line holds a theme.
    """
    themes = readable(file_rows(str(path)), _theme, str(path))
    if not themes:
        raise ValueError(f'{path} holds no theme; every line is like {{"system": "...", "beginnings": ["..."]}}.')
    return tuple(themes)


def _theme(row: Any) -> Theme:
    try:
        return Theme(**parsed(row))
    except TypeError as error:  # a field that themes do not have
        raise ValueError(str(error)) from error


THEMES = (
    Theme(),
    Theme(
        "", ("What is", "What are", "Who was", "When did", "Where is", "Why do", "How does", "Which", "Can you tell me")
    ),
    Theme(
        "You are an AI assistant designed to help users with writing.",
        (
            "Write a short story about",
            "Write an email to",
            "Write a blog post about",
            "Compose a poem about",
            "Draft a letter to",
            "Describe a",
            "Write a product description for",
            "Rewrite the following paragraph",
            "Give feedback on",
        ),
    ),
    Theme(
        "You are an AI assistant that plays any role the user asks for.",
        (
            "Pretend to be",
            "Imagine you are",
            "You are now a",
            "Act as",
            "Take on the role of",
            "Let's play a game. You are",
            "If you were",
        ),
    ),
    Theme(
        "You are an AI assistant designed to solve logic puzzles and to reason step by step.",
        (
            "Suppose",
            "If all",
            "There are three",
            "A farmer has",
            "Which of these",
            "Is the following argument valid?",
            "David",
        ),
    ),
    Theme(
        "You are an AI assistant designed to solve mathematical problems step by step.",
        (
            "Solve for x:",
            "What is the value of",
            "Find the",
            "Calculate",
            "A train travels",
            "A rectangle has",
            "The sum of",
            "Let f(x) =",
            "Sarah has",
            "A store sells",
            "If a",
            "How many",
        ),
    ),
    Theme(
        "You are an AI assistant designed to help programmers.",
        (
            "Write a Python function that",
            "Write a program that",
            "Write a function in JavaScript to",
            "Implement a",
            "How do I",
            "Write an SQL query",
            "Explain what this code does:\n\n```python\n",
            "Fix the bug in this code:\n\n```python\n",
            "Write a regular expression",
            "Write a C++ program to",
        ),
    ),
    Theme(
        "You are an AI assistant designed to extract information from texts and to put it in order.",
        (
            "Extract the names and dates from the following text:\n\n",
            "Given the following data, ",
            "Make a table of",
            "List all",
            "Classify each of the following sentences as positive or negative:\n\n",
            "Read these reviews and rate each from 1 to 5:\n\n",
            "Return the answer in JSON. ",
        ),
    ),
    Theme(
        "You are an AI assistant designed to explain science and technology.",
        (
            "Explain how",
            "What happens when",
            "Describe the process of",
            "In the field of",
            "What is the difference between",
            "How do scientists",
            "Why is",
            "What are the main causes of",
        ),
    ),
    Theme(
        "You are an AI assistant who knows history, art, economics, law and philosophy.",
        (
            "Discuss",
            "Compare",
            "What were the causes of",
            "Give an overview of",
            "Provide insights into",
            "How did",
            "Analyse the role of",
            "Suggest a lesson plan for",
        ),
    ),
    Theme(
        "You are an AI assistant designed to translate texts.",
        (
            "Translate the following sentence from German to English: Die",
            "Translate German to English: Der",
            "Translate German to English: Wir",
            "Translate this into English: Es",
            "Translate German to English: In",
            "Translate the following sentence into French:",
            "Translate into Spanish:",
            "Translate German to English: Ich",
            "Translate German to English: Das",
        ),
    ),
    Theme(
        "You are an AI assistant designed to summarize texts.",
        (
            "Summarize the following article:\n\n",
            "Summarize this news report in three sentences:\n\n(CNN)",
            "What is the main idea of the following passage?\n\n",
            "Summarize: The",
            "Write a short summary of this text:\n\nLONDON",
            "Please summarize:\n\nA man",
        ),
    ),
    Theme(
        "You are an AI assistant that gives advice for everyday life.",
        (
            "How can I",
            "What should I",
            "Give me some tips",
            "I want to",
            "I am planning a trip to",
            "Suggest",
            "My",
            "Help me",
        ),
    ),
)

# What is asked about texts that the target has written before, in place of `{}`. It ends the open ones itself.
COMPLETE_ABOUT_TEXT = (
    "Summarize the following text:\n\n{}",
    "Summarize the following text in one sentence.\n\n{}",
    "{}\n\nWrite a short summary of the text above.",
    "Please write a summary of this article:\n\n{}",
    "What are the main points of this text?\n\n{}",
    "Rewrite the following text in simpler words:\n\n{}",
    "Correct any mistakes in the following text:\n\n{}",
    "List the most important facts of this text:\n\n{}",
    "Translate the following text into German:\n\n{}",
)
OPEN_ABOUT_TEXT = (
    "{}\n\nQuestion:",
    "Context: {}\n\nAnswer the following question using the context: What",
    "Read the text and answer the question.\n\n{}\n\nQuestion: Why",
    "Use the following passages to answer the question.\n\n{}\n\nQuestion: How",
    "{}\n\nAccording to the text above, who",
    "Answer the question based on this document: {}\n\nwhat is",
    "{}\n\nBased on this, ",
)
