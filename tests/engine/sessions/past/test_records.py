"""The texts of turn records, as the ledgers of earlier versions hold them."""

from __future__ import annotations

from batchengine.engine.turns import records

# as a daemon wrote it on 2026-11-23
WRITTEN = (
    '{"sampling":{},"tokens_max":9,"form":"chat","output":'
    '{"family":"hermes","in_reasoning":true,"calls":true,"tool":"ls","text_parameters":{"ls":["d"]}}}'
)


def test_a_record_is_read_and_written_under_the_names_of_earlier_versions() -> None:
    record = records.turn_record(WRITTEN)
    assert record is not None
    assert record.output.markup == "hermes"
    assert '"output":{"family":"hermes","in_reasoning":true' in records.encode(record)
    assert records.turn_record(records.encode(record)) == record
