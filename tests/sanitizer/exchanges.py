"""Exchanges of two ranks on one card, and the kernels that try a link."""

import contextlib
from functools import partial

import torch

from duovolt.kernels import checks, mailbox
from duovolt.kernels import module as mod
from duovolt.kernels.tuning import Choice, using

from .launching import empty, half, here, randn, run, sides, tell, touch, weight, zeros

SLOT = 12000
BUDGET = 4.0  # seconds that a rank waits for the other


def _ends(alone, far):
    """Links over words on the card: a rank that hears itself, or both of a pair. `far`: as if words were the host's."""
    inboxes = [torch.zeros(2 * SLOT, dtype=torch.int64).to(here.device) for _ in range(2)]
    links = []
    for rank in (0, 1):
        state = mailbox.new_state(here.device)
        expired = torch.zeros(1, dtype=torch.int32, pin_memory=not here.recorded)
        to = inboxes[rank if alone else 1 - rank]
        links.append(mailbox.Link(inboxes[rank].data_ptr(), to.data_ptr(), state, expired, BUDGET, SLOT, rank, far))
        links[-1].kept = inboxes
    mailbox.prepare(here.device)
    torch.cuda.synchronize()
    return links


def _hosts():
    """The same in pinned memory of the host."""
    inbox = torch.zeros(2, 2 * SLOT, dtype=torch.int64, pin_memory=not here.recorded)
    links = []
    for rank in (0, 1):
        state, expired = mailbox.new_state(here.device), torch.zeros(1, dtype=torch.int32, pin_memory=not here.recorded)
        links.append(
            mailbox.Link(inbox[rank].data_ptr(), inbox[1 - rank].data_ptr(), state, expired, BUDGET, SLOT, rank, True)
        )
        links[-1].kept = inbox
    mailbox.prepare(here.device)
    torch.cuda.synchronize()
    return links


def exchanges(native):
    """First alone, with its own words for the other's: nothing waits for a second kernel, whatever the tool does with streams."""

    def messages():
        """Of one side: a call of a link, and its outputs. No memory is taken or given back between the launches."""
        found = []
        for shape in ((1, 2), (1, 514), (3, 1022), (4, 5120)):
            part, out = half(*shape), empty(*shape)
            found.append((f"reduce {shape}", lambda link, part=part, out=out: mailbox.reduce(link, part, out), [out]))
        for rows, columns in ((1, 8), (3, 1032), (4, 5120), (2, 8192)):
            part, out = half(rows, columns), empty(rows, columns, dtype=torch.float16)
            x, own, counts = randn(rows, columns), randn(columns), zeros(rows, dtype=torch.int32)
            then = [weight("nvfp4", 64, 560), weight("fp8", 64, 560)] if rows == 3 else []
            call = lambda link, part=part, x=x, own=own, out=out, counts=counts, then=then: mailbox.reduce_norm(  # noqa: E731
                link, part, x, own, 1e-6, out, counts, then
            )
            found.append((f"reduce_norm {rows} x {columns}", call, [out, x]))
        for rows, columns in ((1, 1), (4, 128), (2, 3001)):
            part, out = randn(rows, columns + 5), empty(rows, 2 * columns + 6)
            call = lambda link, part=part, out=out, n=columns: mailbox.gather(link, part[:, :n], out[:, : 2 * n])  # noqa: E731
            found.append((f"gather {rows} x {columns}", call, [out[:, : 2 * columns]]))
        for shape in ((1, 2), (3, 1022)):
            part, other, out = half(*shape), half(*shape), empty(*shape)

            def join(link, part=part, other=other, out=out):
                mailbox.meet(link)
                mailbox.join(link, part, other.data_ptr(), out)

            found.append((f"meet and join {shape}", join, [out]))
        return found

    def alone(far, early):
        links = _ends(True, far)
        for name, call, outs in messages():
            with using(Choice(early=frozenset({"exchange"} if early else ()))), mod.overlapping(early):
                for link in links:
                    for _ in range(3):
                        call(link)
            touch(*outs)
            if name == "reduce (4, 5120)" and here.tool == "plain" and not here.recorded:
                assert bool(torch.isfinite(outs[0]).all()) and bool(outs[0].any())
        torch.cuda.synchronize()
        assert not any(int(link.expired[0]) for link in links), "a wait expired"

    def pair(links):
        both = [messages(), messages()]
        both_streams = sides(2)
        torch.cuda.synchronize()
        for _ in range(2):
            for name, _, _ in both[0]:
                for link, stream, own in zip(links, both_streams, both, strict=True):
                    with contextlib.nullcontext() if here.recorded else torch.cuda.stream(stream):
                        next(call for what, call, _ in own if what == name)(link)
                torch.cuda.synchronize()
                if any(int(link.expired[0]) for link in links):
                    tell("note: both ranks did not run at once here,", name)
                    return
        for own in both:
            for _, _, outs in own:
                touch(*outs)

    for far in (False, True):
        for early in (False, True) if native else (False,):
            run(f"mailbox alone{', far' * far}{', early' * early}", partial(alone, far, early))

    def add():
        for shape in ((1, 2), (3, 1022)):
            out = empty(*shape)
            mailbox.add(half(*shape), half(*shape), out)
            touch(out)

    run("mailbox_add", add)

    def link_kernels(count, alone):
        module = checks.module_on("link.cu", here.device)
        to, mine = zeros(count, dtype=torch.int64), zeros(count, dtype=torch.int64)
        wrong, results = zeros(1, dtype=torch.int32), [empty(2, dtype=torch.int64) for _ in range(2)]
        module.launch("link_store", 4, 256, (to, count, 3))
        module.launch("link_check", 4, 256, (to, count, 3, wrong))
        to[:1].zero_()
        torch.cuda.synchronize()
        if alone:
            module.launch("link_ping", 1, 1, (to, to, results[0], 20, 1, 500))
            return touch(results[0], wrong)
        module.attribute("link_ping", "NUM_REGS")  # loads it: the second must not wait for that behind the first
        for rank, stream in enumerate(sides(2)):
            with contextlib.nullcontext() if here.recorded else torch.cuda.stream(stream):
                ends = (mine, to) if rank else (to, mine)
                module.launch("link_ping", 1, 1, (*ends, results[rank], 20, rank, 1000))
        torch.cuda.synchronize()
        touch(*results)
        if not here.recorded and int(results[1][0]) != 20:
            tell("note: both ends of link_ping did not run at once here")

    for count in (1, 31, 5120):
        run(f"link, {count} words", partial(link_kernels, count, True))
    run("link, both ends", partial(link_kernels, 64, False))
    run("mailbox of both ranks, words on the card", lambda: pair(_ends(False, False)))
    run("mailbox of both ranks, words in the host's memory", lambda: pair(_hosts()))
