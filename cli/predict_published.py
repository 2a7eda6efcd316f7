"""The tables of `duovolt predict --study` and `--published`: others' figures beside ours."""

from ..perf.cards import load_card
from ..perf.published import derive
from ..perf.study import DENSE, H200_READS, Sizes, dense_kernels, reproduce


def print_study() -> None:
    """Forecasts of the study reproduced, and sums over real sizes beside their means."""
    print("tokens a second: ours by the study's method, the study's forecast, what it measured")
    for row in reproduce():
        measured = f"{row.measured:>9.2f}" if row.measured else ""
        print(f"  {row.what:<56}{row.ours:>8.1f}{row.published:>8.1f} {row.off:+.2%}{measured}")
    print("milliseconds: a sum over kernels of real sizes, as many kernels of the mean size, measured")
    for card, sizes in (
        (load_card("rtx-5090"), Sizes(f"{DENSE.name}, matrix-vector kernels", dense_kernels(), 0.0)),
        (load_card("h200"), H200_READS),
    ):
        measured = f"{sizes.seconds * 1e3:>8.3f}" if sizes.seconds else ""
        print(f"  {sizes.what:<56}{sizes.by_sum(card) * 1e3:>8.3f}{sizes.by_mean(card) * 1e3:>8.3f}{measured}")


def print_published() -> None:
    """Published rounds on V100s beside the floor, kernels as fast as reads, and kernels as fast as theirs."""
    print("ms a round: published; bytes alone; kernels as fast as a plain read; as fast as theirs")
    for found in derive():
        figure, shares = found.figure, found.shares
        print(
            f"  {figure.what:<28}{figure.milliseconds:>7.1f}{found.plain.floor * 1e3:>7.1f}"
            f"{found.plain.seconds * 1e3:>7.1f}{shares.seconds * 1e3:>7.1f} {found.off:+.0%}  "
            + ", ".join(f"{name} {seconds * 1e3:.1f}" for name, (_, _, seconds) in shares.families.items())
        )
