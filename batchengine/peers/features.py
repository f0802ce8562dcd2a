"""Optional parts of the protocol between daemons, by the names under which Hello lists them."""

from __future__ import annotations

from batchengine.wire import data

DATA_LINKS = f"data {data.VERSION}"  # it opens data links, which have no greeting
HOLDS = "holds"  # it keeps pages for sessions of peers
OTHER_MODELS = "other models"  # also for those of peers that serve another model
STAGES = "stages 2"  # its workers can be stages of a pipeline, also of recurrent layers
STATES = "states"  # it takes recurrent states for turns that it is to compute
TURNS = "turns"  # it computes turns of peers
FEATURES = (DATA_LINKS, HOLDS, OTHER_MODELS, STAGES, STATES, TURNS)  # of this version
OF_OTHER_MODELS = (DATA_LINKS, HOLDS)  # that daemons with different models have for each other
