"""Plain text and facts out of reStructuredText, in the form that `text.py` describes."""

from __future__ import annotations

import re

from .facts import Fact

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
