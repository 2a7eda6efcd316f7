"""Plain text out of documentation: HTML and docstrings here, reStructuredText in `rst.py`.

All three end in the same form, chosen for a small language model: headings as ``# Title``, one line a prose
paragraph, code blocks with their own line breaks, inline markup reduced to `` `code` ``. The reStructuredText walker
also collects what the documentation says about each documented object (see :class:`Fact`), from which the
dialogues are made.
"""

from __future__ import annotations

import ast
import html.parser
import inspect
import re

from .facts import Fact
from .rst import RstText


class HtmlText(html.parser.HTMLParser):
    """The text of one documentation page: headings, paragraphs, list items and preformatted blocks of its body."""

    SKIPPED = {"script", "style", "nav", "header", "footer", "table", "head", "form", "svg", "aside"}
    BREAKS = {"p", "li", "dt", "dd", "h1", "h2", "h3", "h4", "div", "section", "ul", "ol", "dl", "article"}
    NAVIGATION = re.compile(r"sphinxsidebar|related|navheader|navfooter|headerlink|footer|toc|breadcrumb|nav")

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._words: list[str] = []
        self._skipping: list[str] = []
        self._pre = 0
        self._prefix = ""
        self.feed(page)
        self._flush()

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipping:
            if tag == self._skipping[-1]:
                self._skipping.append(tag)
            return
        marks = " ".join(value or "" for key, value in attrs if key in ("class", "role", "id"))
        if tag in self.SKIPPED or (tag in ("div", "a", "ul", "section") and self.NAVIGATION.search(marks)):
            self._skipping = [tag]
            return
        if tag == "pre":
            self._flush()
            self._pre += 1
        elif tag in self.BREAKS:
            self._flush()
            self._prefix = "# " if tag in ("h1", "h2", "h3", "h4") else "- " if tag == "li" else self._prefix
        elif tag in ("code", "tt") and not self._pre:
            self._words.append("`")

    def handle_endtag(self, tag: str) -> None:
        if self._skipping:
            if tag == self._skipping[-1]:
                self._skipping.pop()
            return
        if tag == "pre" and self._pre:
            lines = "".join(self._words).strip("\n").splitlines()
            if lines:
                self.paragraphs.append("\n".join("    " + line.rstrip() for line in lines))
            self._words = []
            self._pre -= 1
        elif tag in self.BREAKS:
            self._flush()
        elif tag in ("code", "tt") and not self._pre:
            self._words.append("`")

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self._words.append(data)

    def _flush(self) -> None:
        text = re.sub(r"\s+", " ", "".join(self._words)).replace("¶", "").strip()
        self._words = []
        if text and text != "`":
            self.paragraphs.append(self._prefix + text)
        if text:
            self._prefix = ""


def python_docstrings(source: str, module: str) -> tuple[str, list[Fact]]:
    """The docstrings of one Python file, each under its name and signature, and the facts they state.

    Private names are left out. Raises SyntaxError for a file that does not parse.
    """
    tree = ast.parse(source)
    parts: list[str] = []
    facts: list[Fact] = []

    def emit(node: ast.AST, name: str, signature: str, kind: str) -> None:
        docstring = (
            ast.get_docstring(node, clean=False)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            else None
        )
        if not docstring or len(docstring) < 12:
            return
        rst = RstText(inspect.cleandoc(docstring))
        if not rst.paragraphs:
            return
        parts.append((f"`{signature}`\n\n" if kind != "module" else f"# {module}\n\n") + rst.text)
        prose = next((p for p in rst.paragraphs if p[0].isalpha() and not p.startswith(("# ", "`", "    "))), "")
        if prose:
            facts.append(Fact(kind, name, signature, prose.replace("\n", " ")))

    def visit(body: list[ast.stmt], prefix: str, inside: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                emit(node, f"{prefix}.{node.name}", f"class {node.name}", "class")
                visit(node.body, f"{prefix}.{node.name}", node.name)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
                arguments = [a for a in ast.unparse(node.args).split(", ") if a not in ("self", "cls")]
                call = f"{inside + '.' if inside else ''}{node.name}({', '.join(arguments)})"
                emit(node, f"{prefix}.{node.name}", call, "method" if inside else "function")

    emit(tree, module, module, "module")
    visit(tree.body, module, "")
    return "\n\n".join(parts), facts
