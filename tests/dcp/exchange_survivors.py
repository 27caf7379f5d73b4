"""Mutants of the exchange's code that nothing notices: why -> name -> which of that name."""

SURVIVORS = {
    (
        "the word was written by the launch before, and nobody writes it while it may be "
        "read: caches are empty when a launch begins"
    ): {
        (
            "global_load_dwordx2 without sc1 at exchange_kernel.py: @flyc.kernel(name=build.symbol)"
        ): (1, 4, 10, 12, 16, 52, 55, 56, 57, 68, 70),
    },
    "the first look for errors is a hint: every wait looks again": {
        (
            "global_load_dwordx2 without sc0 at exchange_kernel.py: @flyc.kernel(name=build.symbol)"
        ): (1,),
        (
            "global_load_dwordx2 without sc1 at exchange_kernel.py: @flyc.kernel(name=build.symbol)"
        ): (2,),
    },
    ("a later wait covers it: loads come back in order, or what it waits for was used before"): {
        (
            "s_waitcnt vmcnt dropped at wave.py: return "
            "type(value)(rocdl.readfirstlane(value.dtype.ir_type, value.ir_value()))"
        ): (1,),
        (
            "s_waitcnt lgkmcnt dropped at wave.py: return "
            "type(value)(rocdl.readlane(value.dtype.ir_type, value.ir_value(), lane))"
        ): (1,),
        (
            "s_waitcnt lgkmcnt dropped at mailbox.py: word = word | "
            "fx.Int64(fx.Uint32(fx.Int32(_launch(end))))"
        ): (1,),
    },
    (
        "a report that a failing wave does not see yet is one that comes later: it "
        "records its own; and every wait of the other waves and ranks listens too"
    ): {
        (
            "global_load_dwordx2 without sc0 at exchange_kernel.py: @flyc.kernel(name=build.symbol)"
        ): (2, 9, 43, 44, 51),
        (
            "global_store_dwordx2 without sc0 at exchange_kernel.py: "
            "@flyc.kernel(name=build.symbol)"
        ): (17,),
    },
    (
        "the host looks at its word between steps; the end of the kernel brings it out at"
        " the latest"
    ): {
        (
            "global_store_dwordx2 without sc0 at exchange_kernel.py: "
            "@flyc.kernel(name=build.symbol)"
        ): (1, 12, 14, 16, 18, 20, 24),
        (
            "global_store_dwordx2 without sc1 at exchange_kernel.py: "
            "@flyc.kernel(name=build.symbol)"
        ): (1, 12, 14, 16, 18, 21, 25),
    },
    (
        "words that are cleared are read two launches later: the end of the kernel brings"
        " the zeros out"
    ): {
        (
            "global_store_dwordx2 without sc0 at exchange_kernel.py: "
            "@flyc.kernel(name=build.symbol)"
        ): (8, 9, 10, 11),
        (
            "global_store_dwordx2 without sc1 at exchange_kernel.py: "
            "@flyc.kernel(name=build.symbol)"
        ): (8, 9, 10, 11),
    },
    ("the first look: a word that is not seen is looked for again, one that is seen has its tag"): {
        (
            "global_load_dwordx2 without sc0 at exchange_kernel.py: @flyc.kernel(name=build.symbol)"
        ): (11, 12, 13, 14, 15, 16, 17, 19, 20, 21, 22, 23, 24),
    },
    (
        "of the loads of one line: those beside it go past all caches and fetch the line "
        "anew; without the bit in all of them it is noticed (test_exchange_mutations.py)"
    ): {
        (
            "global_load_dwordx2 without sc0 at exchange_kernel.py: @flyc.kernel(name=build.symbol)"
        ): (27, 29, 31, 32, 33, 35, 37, 38, 39, 40, 41),
    },
    ("other waits of the rank hear of it first, and say so in the rank's own error word"): {
        (
            "global_load_dwordx2 without sc0 at exchange_kernel.py: @flyc.kernel(name=build.symbol)"
        ): (42, 50),
    },
    (
        "the load of the generation, between write-back and flag, is waited for, and with"
        " it all before"
    ): {
        (
            "s_waitcnt vmcnt dropped at mailbox.py: "
            "fx.memory_fence(ordering=fx.AtomicOrdering.Release, syncscope=_AGENT)"
        ): (1,),
    },
    (
        "a wait for own workgroups ends without them only when another wave has recorded "
        "an error: it is never the first to; the same lines are noticed in the other "
        "waits"
    ): {
        (
            "global_atomic_cmpswap_x2 without sc0 at mailbox.py: _, stored = "
            "fx.atomic_cas(place, fx.Int64(0), word, syncscope=_AGENT)"
        ): (6,),
        ("s_waitcnt lgkmcnt dropped at exchange_kernel.py: @flyc.kernel(name=build.symbol)"): (9,),
        ("s_waitcnt vmcnt dropped at exchange_kernel.py: @flyc.kernel(name=build.symbol)"): (9,),
        (
            "global_store_dwordx2 without sc0 at exchange_kernel.py: "
            "@flyc.kernel(name=build.symbol)"
        ): (21,),
        (
            "global_store_dwordx2 without sc1 at exchange_kernel.py: "
            "@flyc.kernel(name=build.symbol)"
        ): (22,),
    },
    "the flags were compared before, so that they are here": {
        (
            "s_waitcnt vmcnt dropped at mailbox.py: "
            "fx.memory_fence(ordering=fx.AtomicOrdering.Acquire, syncscope=_AGENT)"
        ): (1,),
    },
    "read by the next launch: the end of the kernel brings it out": {
        ("global_store_dword without sc1 at exchange_kernel.py: @flyc.kernel(name=build.symbol)"): (
            1,
        ),
        (
            "global_store_dwordx2 without sc1 at exchange_kernel.py: "
            "@flyc.kernel(name=build.symbol)"
        ): (27,),
    },
}
