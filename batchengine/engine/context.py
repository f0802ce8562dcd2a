"""What context a daemon accepts: what the model and the settings allow, as far as the store has
pages for it, and linked daemons, which come and go.
"""

from __future__ import annotations

import logging

from batchengine import errors
from batchengine.config import CONTEXT_TOKENS_MIN
from batchengine.core import PAGE_TOKENS, ContextBound, ModelInfo

log = logging.getLogger("batchengine.engine")


class ContextLimit:
    """Keeps `ModelInfo.context_tokens` at what one session can have. `slots`: pages of the store;
    `unheld`: why peers hold no pages of this model, "" = they do."""

    def __init__(self, info: ModelInfo, budget_bytes: int, slots: int, unheld: str) -> None:
        self._info = info
        self._allowed = info.context_tokens, info.context_bound  # without a look at pages
        self._budget_bytes = budget_bytes
        self._slots = slots
        self._unheld = unheld

    def check(self, page_bytes: int) -> None:
        """Raise STORE_TOO_SMALL if the store alone is all that there will be, and holds nothing."""
        if (fits := self._slots * PAGE_TOKENS) < CONTEXT_TOKENS_MIN:
            raise errors.STORE_TOO_SMALL(
                budget_bytes=self._budget_bytes,
                tokens=fits,
                least=CONTEXT_TOKENS_MIN,
                wanted_bytes=max(-(-self._allowed[0] // PAGE_TOKENS), 1) * page_bytes,
            )

    def fit(self, pages_beyond: int) -> str:
        """Set the limit; `pages_beyond` is what peers could hold. Returns what is not as it was
        asked for, "" = nothing."""
        info, (allowed, bound) = self._info, self._allowed
        before, fits = info.context_tokens, (self._slots + pages_beyond) * PAGE_TOKENS
        note = ""
        if CONTEXT_TOKENS_MIN <= fits < allowed:
            where = ", here and with linked daemons," if pages_beyond else ""
            note = (
                f"ctx is {fits:,} instead of {allowed:,}: store.budget_bytes ="
                f" {self._budget_bytes:,}{where} holds no longer session"
            )
            if self._unheld:
                note += f", and {self._unheld}"
            allowed, bound = fits, ContextBound.PEERS if pages_beyond else ContextBound.STORE
            if self._unheld:
                bound = ContextBound.STORE_ALONE
        info.context_tokens, info.context_bound = allowed, bound
        if allowed != before:
            log.info("%s", note or f"ctx is {allowed:,}")
        return note
