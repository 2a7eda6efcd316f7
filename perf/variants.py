"""What if: the same model with one thing changed, each as a ledger and a setting of its own."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..model.config import FULL
from .cards import Card
from .ledger import Ledger, Shape, fused, kv_bytes, ledger_of
from .predict import Forecast, Setting, forecast
from .sheet import Sheet


@dataclass(frozen=True)
class Case:
    """A model and a round to be forecast. `fuse`: linears in a row that are one launch; `head_split`: over the ranks."""

    sheet: Sheet
    shape: Shape
    setting: Setting
    fuse: int = 1
    head_split: bool = True

    def ledger(self) -> Ledger:
        sheet = self.sheet if self.head_split else self.sheet.with_whole_head()
        found = ledger_of(sheet, self.shape)
        return fused(found, self.fuse) if self.fuse > 1 else found

    @property
    def held(self) -> int:
        """Bytes that a rank's card must hold at least: its weights, and keys and values of all lanes."""
        heads, kinds = self.sheet.heads, [layer.kind for layer in self.sheet.layers]
        layers = kinds.count(FULL) + (self.sheet.mtp is not None)
        position = layers * kv_bytes(heads.kv, heads.dim, self.shape.kv)
        return self.sheet.held + self.shape.lanes * self.shape.context * position

    def forecast(self, card: Card) -> Forecast:
        return forecast(self.ledger(), card, self.setting)


def variants(case: Case, card: Card) -> Iterator[tuple[str, Case]]:
    """Each thing that can be changed, with the case in which only it is."""
    shape, setting = case.shape, case.setting
    for factor in (2, 4):
        yield f"linears: {factor} in one launch", replace(case, fuse=factor)
    other = "fp16" if shape.kv == "int8" else "int8"
    yield f"{other} KV", replace(case, shape=replace(shape, kv=other))
    if case.sheet.head_cut and case.sheet.tp > 1:
        word = "whole on every rank" if case.head_split else "split over the ranks"
        yield f"head {word}", replace(case, head_split=not case.head_split)
        if case.head_split:
            what = "whole logits gathered" if shape.head_split else "candidates gathered, not logits"
            yield what, replace(case, shape=replace(shape, head_split=not shape.head_split))
    if case.sheet.tp > 1:
        for link in ("none", *card.links):
            if link != setting.link:
                what = "messages that cost nothing" if link == "none" else f"link: {link}"
                yield what, replace(case, setting=replace(setting, link=link))
    if shape.drafts and case.sheet.draft_head is None:
        rows = case.sheet.head.rows * (case.sheet.tp if case.sheet.head_cut else 1) // 2 // 64 * 64
        if rows:
            yield f"draft head of {rows:,} rows", replace(case, sheet=case.sheet.with_draft_head(rows))
    if case.sheet.mtp is not None:
        for drafts in sorted({0, 1, 2, 3, 4, 5} - {shape.drafts}):
            yield f"{drafts} drafts, same acceptance", replace(case, shape=replace(shape, drafts=drafts))
