"""Verification of drafted tokens on vocabulary shards: how many drafts are kept, and the token that follows them.

:func:`flare_spec.verification.coupled.verify_coupled` emits the text that sampling without drafts emits;
:func:`flare_spec.verification.ratio.verify_ratio` keeps more drafts and emits text of the same distribution.
Both know logits of one rank's ids, collectives and sampling parameters; no models, pages or drafters. This package
loads no torch by itself; the modules in it do.

Bytes that a rank receives in one verification, five drafts a sequence, float32 logits, 129,280 ids (the third column
grows with the vocabulary, the others do not); collectives in brackets. "filtered": every row has top-p, and the
certificate holds; each row whose certificate fails takes 24 KiB, and all such rows together six collectives more.

    ranks  sequences   all-gather  coupled      filtered       ratio        q dense      filtered
    2      1            1,551,360  96 [1]       3,264 [3]      128 [2]      224 [2]      3,308 [4]
    2      32          49,643,520  3,072 [1]    104,448 [3]    4,096 [2]    7,168 [2]    105,856 [4]
    4      1            2,327,040  288 [1]      9,792 [3]      384 [2]      672 [2]      9,924 [4]
    4      32          74,465,280  9,216 [1]    313,344 [3]    12,288 [2]   21,504 [2]   317,568 [4]

With q as a whole row an all-gather would bring 5/6 more.
"""
