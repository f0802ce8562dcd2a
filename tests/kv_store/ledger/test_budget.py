"""The shares of the ledger's limits: no tenant loses sessions because others have too many."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_store.ledger.budget import Kept, fair_share, over_share

USES = st.lists(st.integers(0, 50), max_size=8)


@given(USES, st.integers(0, 120))
def test_a_fair_share_fills_the_limit_and_no_more(uses: list[int], limit: int) -> None:
    share = fair_share(uses, limit)
    together = sum(min(use, share) for use in uses)
    assert together <= limit or not limit
    if sum(uses) > limit:
        assert sum(min(use, share + 1) for use in uses) > limit
    else:
        assert all(use <= share for use in uses)


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.booleans()), max_size=30),
    st.integers(0, 12),
    st.integers(0, 60),
)
def test_only_tenants_over_their_share_lose_sessions(
    made: list[tuple[str, int, bool]], sessions_max: int, bytes_max: int
) -> None:
    """Longest unused first, and as many as bring every tenant within its share."""
    sessions = [Kept(f"{at}", tenant, 1, at, size) for at, (tenant, size, _) in enumerate(made)]
    keep = {f"{at}" for at, (_, _, is_kept) in enumerate(made) if is_kept}
    gone = over_share(sessions, sessions_max, bytes_max, keep, 1000)
    assert not keep & {one.id for one in gone}
    left = [one for one in sessions if one not in gone]
    for tenant in "abc":
        mine = [one for one in sessions if one.tenant == tenant]
        stay = [one for one in left if one.tenant == tenant]
        others = {one.tenant for one in sessions}
        if len(mine) * len(others) <= sessions_max:
            is_small = sum(one.row_bytes for one in mine) * len(others) <= bytes_max
            assert stay == mine or not is_small
        lost = [one.used_seq for one in mine if one not in stay]
        free = [one.used_seq for one in stay if one.id not in keep]
        assert not lost or not free or max(lost) < min(free)
    if not keep:
        assert len(left) <= sessions_max
        assert sum(one.row_bytes for one in left) <= bytes_max
    assert over_share(sessions, sessions_max, bytes_max, keep, 2) == gone[:2]
