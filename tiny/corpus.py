"""The training text: documents out of Python's documentation and of permissively licensed packages.

``python -m duovolt.tiny.corpus SOURCES OUT`` reads an unpacked set of documentation packages (``SOURCES/root``) and
wheels (``SOURCES/wheels``), both listed in ``README.md`` with their licences, and writes into ``OUT``
``documents.jsonl`` (training documents), ``facts.jsonl`` (what the training documents state about named objects),
``heldout.txt``, ``words.txt`` and ``corpus.json``, which records it all. Whole documents are held out, and a paragraph
of a held-out document that occurs elsewhere is removed from the training documents; then what is left of the held-out
documents loses every paragraph that still has :data:`SHARED_RUN` words in a row in common with a training document.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .facts import Fact
from .rst import RstText
from .text import HtmlText, python_docstrings

RST_PACKAGES = (
    "python3.11",
    "aiohttp",
    "attr",
    "click",
    "coverage",
    "cryptography",
    "dask",
    "distributed",
    "flask",
    "ipython",
    "jinja2",
    "pandas",
    "pygments",
    "pyparsing",
    "pytest",
    "requests",
    "setuptools",
    "sympy",
    "tornado",
    "werkzeug",
    "xarray",
    "sphinx",
)
HTML_PACKAGES = ("python-django-doc", "python-sqlalchemy-doc", "postgresql-doc-15", "python-markdown-doc")
NOT_PROSE = re.compile(
    r"(^|/)(tests?|testing|externals|_?vendor|vendored|lib2to3|idlelib|turtledemo)/|genindex|py-modindex"
    r"|/_modules/|search\.html|generated/|/api/pandas"
)
HELDOUT_BYTES = 84_000
SHARED_RUN = 12
HELDOUT_MARK = "=== document: {name} ==="
KNOWN_WORD_COUNT = 12
KNOWN_WORDS_BYTES = 115_000


@dataclass
class Document:
    """One document: ``name`` says where it came from, ``text`` is plain (see :mod:`.text`)."""

    name: str
    text: str
    facts: list[Fact] = field(default_factory=list)


def documentation(root: Path) -> Iterator[Document]:
    """The documents of unpacked Debian documentation packages, in a fixed order."""
    for package in RST_PACKAGES:
        folder = next(
            (
                f
                for f in (
                    root / "usr/share/doc" / name / "html/_sources"
                    for name in (package, f"python-{package}-doc", f"{package}-doc", f"python-{package}")
                )
                if f.is_dir() and any(f.iterdir())
            ),
            None,
        )
        if folder is None:
            raise SystemExit(f"corpus: no documentation of {package} under {root}; see README.md for the packages")
        for path in sorted(folder.rglob("*.txt")):
            if not NOT_PROSE.search(str(path.relative_to(folder))):
                rst = RstText(path.read_text(encoding="utf-8", errors="replace"))
                yield Document(
                    f"{package}/{path.relative_to(folder)}", rst.text, rst.facts if package == "python3.11" else []
                )
    for package in HTML_PACKAGES:
        folder = root / "usr/share/doc" / package
        for path in sorted(folder.rglob("*.html")):
            if not NOT_PROSE.search(str(path.relative_to(folder))) and not path.is_symlink():
                page = HtmlText(path.read_text(encoding="utf-8", errors="replace"))
                yield Document(f"{package}/{path.relative_to(folder)}", page.text)
    jargon = gzip.decompress((root / "usr/share/dictd/jargon.dict.dz").read_bytes()).decode("utf-8", errors="replace")
    entries = re.split(r"\n(?=\S)", jargon)
    for at in range(0, len(entries), 12):
        text = "\n\n".join(" ".join(entry.split()) for entry in entries[at : at + 12])
        yield Document(f"jargon/{at}", re.sub(r"[{}]", "", text))


def docstrings(wheels: Path) -> Iterator[Document]:
    """The docstrings of the running Python's standard library and of every wheel in ``wheels``."""
    library = Path(json.__file__).parent.parent
    files = [
        (path.relative_to(library).as_posix(), "stdlib", path.read_bytes())
        for path in sorted(library.rglob("*.py"))
        if "site-packages" not in path.parts
    ]
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            files += [
                (name, wheel.name.split("-")[0], archive.read(name))
                for name in sorted(archive.namelist())
                if name.endswith(".py")
            ]
    for name, package, content in files:
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if NOT_PROSE.search(name) or re.search(r"(^|\.)(conftest|setup|test_\w+)$", module):
            continue
        try:
            text, facts = python_docstrings(content.decode("utf-8", errors="replace"), module)
        except (SyntaxError, ValueError, RecursionError):
            continue
        yield Document(f"{package}/{name}", text, facts)


def tidy(document: Document, seen: collections.Counter[int]) -> Document:
    """Drops tables of numbers, very long code blocks, and long paragraphs already seen three times."""
    kept = []
    for paragraph in document.text.split("\n\n"):
        letters = sum(map(str.isalpha, paragraph))
        if letters < 0.45 * len(paragraph.replace(" ", "")) or len(paragraph) > 3000 or "\ufffd" in paragraph:
            continue
        if paragraph.startswith("    ") and len(paragraph) > 900:
            continue
        if len(paragraph) > 50:
            seen[hash_of(paragraph)] += 1
            if seen[hash_of(paragraph)] > 3:
                continue
        kept.append(paragraph)
    return Document(document.name, "\n\n".join(kept), document.facts)


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents. Held out: middle-sized documents in the order of their names' hashes, until
    :data:`HELDOUT_BYTES` are reached; what they share with the others is cut from the others."""
    held: list[Document] = []
    size = 0
    for document in sorted(documents, key=lambda d: hash_of(d.name)):
        if 2000 <= len(document.text) <= 9000 and size + len(document.text) <= HELDOUT_BYTES:
            held.append(document)
            size += len(document.text.encode())
    names = {document.name for document in held}
    shared = {hash_of(p) for document in held for p in document.text.split("\n\n") if len(p) > 40}
    training = []
    for document in documents:
        if document.name not in names:
            text = "\n\n".join(p for p in document.text.split("\n\n") if hash_of(p) not in shared)
            training.append(Document(document.name, text, document.facts))
    return training, held


def runs(text: str) -> Iterator[int]:
    """A hash of every :data:`SHARED_RUN` consecutive words of ``text``, in lower case."""
    words = re.findall(r"\w+", text.lower())
    for at in range(len(words) - SHARED_RUN + 1):
        yield hash(tuple(words[at : at + SHARED_RUN]))


def without_echoes(held: list[Document], training: list[Document]) -> list[Document]:
    """The held-out documents without the paragraphs that share a run of words with the training text or its facts."""
    suspects = {run for document in held for run in runs(document.text)}
    echoed: set[int] = set()
    for document in training:
        for text in (document.text, *(fact.text for fact in document.facts)):
            echoed.update(run for run in runs(text) if run in suspects)
    return [Document(d.name, "\n\n".join(p for p in d.text.split("\n\n") if echoed.isdisjoint(runs(p)))) for d in held]


def known_words(documents: list[Document]) -> list[str]:
    """Lower-case alphabetic words seen at least :data:`KNOWN_WORD_COUNT` times, most frequent first, cut at
    :data:`KNOWN_WORDS_BYTES`, then sorted."""
    counts: collections.Counter[str] = collections.Counter()
    for document in documents:
        counts.update(re.findall(r"(?<![A-Za-z_])[a-z]{2,}(?![A-Za-z_])", document.text))
    words, size = ["a", "i"], 4
    for word, count in counts.most_common():
        if count < KNOWN_WORD_COUNT or size + len(word) + 1 > KNOWN_WORDS_BYTES:
            break
        words.append(word)
        size += len(word) + 1
    return sorted(words)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m duovolt.tiny.corpus", description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    seen: collections.Counter[int] = collections.Counter()
    documents = []
    for document in [*documentation(args.sources / "root"), *docstrings(args.sources / "wheels")]:
        document = tidy(document, seen)
        if len(document.text) >= 300:
            documents.append(document)
    training, held = split(documents)
    held = without_echoes(held, training)
    with (args.out / "documents.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"name": d.name, "text": d.text}, ensure_ascii=False) + "\n" for d in training)
    with (args.out / "facts.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(
            json.dumps({"document": d.name, **asdict(f)}, ensure_ascii=False) + "\n" for d in training for f in d.facts
        )
    heldout = "\n\n".join(HELDOUT_MARK.format(name=d.name) + "\n\n" + d.text for d in held) + "\n"
    (args.out / "heldout.txt").write_text(heldout, encoding="utf-8")
    words = known_words(training)
    (args.out / "words.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    sizes: collections.Counter[str] = collections.Counter()
    for document in training:
        sizes[document.name.split("/")[0]] += len(document.text)
    record = {
        "training_documents": len(training),
        "training_characters": sum(sizes.values()),
        "by_source": sizes,
        "heldout_documents": [document.name for document in held],
        "heldout_bytes": len(heldout.encode()),
        "heldout_sha256": hashlib.sha256(heldout.encode()).hexdigest(),
        "known_words": len(words),
    }
    (args.out / "corpus.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
