"""Plain text out of documentation: reStructuredText, HTML and docstrings.

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
from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """What a document says first about one object: ``kind`` is the directive (function, method, class ...),
    ``name`` the dotted name, ``signature`` the call form, ``text`` the first prose paragraph."""

    kind: str
    name: str
    signature: str
    text: str


OBJECTS = {
    "function",
    "method",
    "class",
    "exception",
    "data",
    "attribute",
    "classmethod",
    "staticmethod",
    "decorator",
    "coroutinefunction",
    "coroutinemethod",
    "opcode",
    "describe",
    "option",
    "cmdoption",
    "envvar",
    "term",
    "abstractmethod",
    "decoratormethod",
    "autofunction",
    "c:function",
    "c:macro",
    "c:type",
    "pdbcommand",
}
KEPT_TEXT = {
    "note",
    "warning",
    "seealso",
    "tip",
    "important",
    "impl-detail",
    "topic",
    "caution",
    "attention",
    "hint",
    "admonition",
    "sidebar",
    "availability",
    "rubric",
    "glossary",
    "danger",
    "container",
    "tabs",
    "tab",
}
KEPT_CODE = {
    "code-block",
    "code",
    "sourcecode",
    "doctest",
    "testcode",
    "ipython",
    "parsed-literal",
    "python",
    "code-tab",
}
VERSIONS = {
    "versionadded": "New in version",
    "versionchanged": "Changed in version",
    "deprecated": "Deprecated since version",
}

DIRECTIVE = re.compile(r"^(\s*)\.\. ([A-Za-z][\w:.+-]*?)::\s*(.*)$")
TITLE_RULE = re.compile(r"^([=\-~^\"'`#*+:.<>_])\1{2,}\s*$")
ROLE = re.compile(r":[A-Za-z][\w:+-]*:`([^`]*)`")
LINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?")
LIST_ITEM = re.compile(r"^(\*|-|\+|#\.|\d+[.)]|\(?[a-z][.)])\s+")


def inline(text: str) -> str:
    """One paragraph's inline markup, simplified: roles and literals become `` `code` ``, links their words."""

    def role(match: re.Match[str]) -> str:
        words = match.group(1)
        if words.endswith(">") and "<" in words:
            words = words[: words.rindex("<")].strip()
        return "\0" + words.lstrip("!~").removeprefix(".") + "\0"  # \0: a finished mark, out of reach of the next rules

    text = ROLE.sub(role, text.replace("\0", ""))
    text = LINK.sub(r"\1", text)
    text = re.sub(r"``([^`]+?)``", "\0\\1\0", text)
    text = re.sub(r"`([^`]+)`__?(?!\w)", r"\1", text)
    text = text.replace("\0", "`")
    text = re.sub(r"\*\*([^*]+)\*\*", r"\1", text)
    text = re.sub(r"(?<![\w*])\*([^\s*](?:[^*]*[^\s*])?)\*(?![\w*])", r"\1", text)
    text = re.sub(r"\|([A-Za-z][\w-]*)\|", r"\1", text)
    text = re.sub(r"\[[#*]?\w*\]_", "", text)
    text = re.sub(r"\\([ *`_|])", lambda m: "" if m.group(1) == " " else m.group(1), text)
    return re.sub(r"\s+", " ", text).strip()


def first_sentences(text: str, limit: int) -> str:
    """The first sentences of ``text``, as many as fit in ``limit`` characters (at least one, if it fits)."""
    parts = re.split(r"(?<=[a-z0-9)`\]\"'])\.\s+(?=[A-Z`])", text)
    taken = ""
    for part in parts:
        sentence = part if part.endswith((".", ".)", "!", "?", ":")) else part + "."
        if len(taken) + len(sentence) + 1 > limit:
            break
        taken = f"{taken} {sentence}".strip()
    return taken


class RstText:
    """Walks one reStructuredText source; afterwards ``paragraphs`` and ``facts`` are filled.

    It is a reader of blocks by indentation, not a full parser: a directive's body is kept as prose, kept as code or
    skipped, by the directive's name.
    """

    def __init__(self, source: str) -> None:
        self.paragraphs: list[str] = []
        self.facts: list[Fact] = []
        self.module = ""
        self.glossary = False
        self.scopes: list[tuple[int, str, str, str, bool]] = []  # indent, kind, name, signature, text already seen
        self.skip_above: int | None = None
        self.code_above: int | None = None
        self._walk(source.expandtabs(8).splitlines())

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)

    def _walk(self, lines: list[str]) -> None:
        at = 0
        while at < len(lines):
            if not lines[at].strip():
                at += 1
                continue
            end = at
            while end < len(lines) and lines[end].strip():
                end += 1
            self._block(lines[at:end])
            at = end

    def _block(self, block: list[str]) -> None:
        indent = len(block[0]) - len(block[0].lstrip())
        if self.skip_above is not None:
            if indent > self.skip_above:
                return
            self.skip_above = None
        if self.code_above is not None:
            if indent > self.code_above:
                self._code(block)
                return
            self.code_above = None
        while self.scopes and indent <= self.scopes[-1][0]:
            self.scopes.pop()
        found = DIRECTIVE.match(block[0])
        if found:
            self._directive(found, block)
        elif block[0].lstrip().startswith(".. ") or block[0].strip() == "..":
            self.skip_above = indent
            rest = [i for i, line in enumerate(block) if i and len(line) - len(line.lstrip()) <= indent]
            if rest:
                self.skip_above = None
                self._block(block[rest[0] :])
        elif block[0].lstrip().startswith(">>>"):
            self._code(block)
        else:
            self._prose(block, indent)

    def _directive(self, found: re.Match[str], block: list[str]) -> None:
        indent, name, argument = len(found.group(1)), found.group(2), found.group(3).strip()
        name = name.removeprefix("py:").removeprefix("rst:")
        body = block[1:]
        same = [i for i, line in enumerate(body) if len(line) - len(line.lstrip()) <= indent]
        following = body[same[0] :] if same else []
        body = body[: same[0]] if same else body
        if name in OBJECTS:
            self._object(indent, name, argument, body)
        elif name in ("module", "currentmodule"):
            self.module = argument
            synopsis = next((line.split(":synopsis:", 1)[1].strip() for line in body if ":synopsis:" in line), "")
            if synopsis:
                self.facts.append(Fact("module", argument, argument, inline(synopsis)))
                self.paragraphs.append(f"`{argument}`: {inline(synopsis)}")
        elif name in VERSIONS:
            words = inline(" ".join([argument, *[line.strip() for line in body]]))
            version, _, rest = words.partition(" ")
            self.paragraphs.append(f"{VERSIONS[name]} {version}{': ' + rest if rest else '.'}")
        elif name in KEPT_CODE:
            self.code_above = indent
            body = [line for line in body if not line.strip().startswith(":")]
            if body:
                self._code(body)
        elif name in KEPT_TEXT:
            self.glossary = self.glossary or name == "glossary"
            body = [line for line in body if not line.strip().startswith(":")]
            if argument and name != "admonition":
                body = [" " * (indent + 3) + argument, *body]
            if body:
                self._block(body)
        else:
            self.skip_above = indent
        if following:
            self.skip_above = None
            self.code_above = None
            self._block(following)

    def _object(self, indent: int, kind: str, argument: str, body: list[str]) -> None:
        signatures = [argument] if argument else []
        prose: list[str] = []
        for line in body:
            text = line.strip()
            if text.startswith(":"):
                continue
            if not prose and ((signatures and signatures[-1].endswith("\\")) or re.match(r"^[\w.]+\(.*\)$", text)):
                signatures.append(text)
            else:
                prose.append(line)
        if not signatures:
            return
        name = re.split(r"[\s(\[]", signatures[0], maxsplit=1)[0].strip()
        outer = next((scope[2] for scope in reversed(self.scopes) if scope[1] in ("class", "exception")), "")
        if outer and "." not in name:
            name = f"{outer}.{name}"
        elif self.module and not name.startswith(self.module + ".") and kind not in ("option", "cmdoption"):
            name = f"{self.module}.{name}"
        self.scopes.append((indent, kind, name, signatures[0], False))
        self.paragraphs.append(" or ".join(f"`{signature}`" for signature in signatures[:3]))
        if prose:
            self._block(prose)

    def _prose(self, block: list[str], indent: int) -> None:
        lines = [line.strip() for line in block]
        if len(lines) >= 2 and TITLE_RULE.match(lines[1]) and len(lines[1]) >= min(4, len(lines[0])):
            self.paragraphs.append("# " + inline(lines[0]))
            if block[2:]:
                self._block(block[2:])
            return
        if len(lines) >= 3 and TITLE_RULE.match(lines[0]) and TITLE_RULE.match(lines[2]):
            self.paragraphs.append("# " + inline(lines[1]))
            if block[3:]:
                self._block(block[3:])
            return
        if any(re.match(r"^[+|=]{1}[-=+|\s]{2,}", line) or line.startswith("| ") for line in lines) or (
            any(re.match(r"^=+(\s+=+)+$", line) for line in lines)
        ):
            return
        if lines[0].startswith(":") and re.match(r"^:[\w ]+:", lines[0]):
            return
        if len(block) > 1 and len(block[1]) - len(block[1].lstrip()) > indent and not LIST_ITEM.match(lines[0]):
            term, meaning = inline(lines[0]), inline(" ".join(lines[1:]))
            self.paragraphs.append(f"{term}: {meaning}")
            if self.glossary:
                self.facts.append(Fact("term", term, term, meaning))
            return
        literal = lines[-1].endswith("::")
        if literal:
            lines[-1] = lines[-1][:-2].rstrip() + ":" if lines[-1] != "::" else ""
            self.code_above = indent
        items: list[str] = []
        for line in lines:
            mark = LIST_ITEM.match(line)
            if mark:
                items.append("- " + line[mark.end() :] if mark.group(1) in "*-+" else line)
            elif items:
                items[-1] += " " + line
            else:
                items.append(line)
        text = "\n".join(item for item in map(inline, items) if item)
        if not text:
            return
        self.paragraphs.append(text)
        if self.scopes and not self.scopes[-1][4]:
            at, kind, name, signature, _ = self.scopes[-1]
            self.scopes[-1] = (at, kind, name, signature, True)
            self.facts.append(Fact(kind, name, signature, text.replace("\n", " ")))

    def _code(self, block: list[str]) -> None:
        margin = min(len(line) - len(line.lstrip()) for line in block)
        self.paragraphs.append("\n".join("    " + line[margin:].rstrip() for line in block))


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
