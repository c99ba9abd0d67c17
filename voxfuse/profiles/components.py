"""Stages of stacks, sorted into the branches of the runtime tree."""

from __future__ import annotations

import re
from collections.abc import Mapping

TOKENIZER, AR, DIT, VOCODER, OTHER = "tokenizer", "AR", "DiT", "vocoder", "other"
COMPONENTS = (TOKENIZER, AR, DIT, VOCODER, OTHER)
_WORDS = (  # the first that a stage's name contains decides
    (VOCODER, r"vocoder|generator|decoder$|hift|hifi|bigvgan|vocos|istft|code2wav|codec.?dec|token2wav|wav"),
    (DIT, r"\bdit\b|flow|cfm|diffusion|denois|estimator|euler"),
    (TOKENIZER, r"tokeni[sz]e|text|phonem|g2p|front.?end|speaker|embed|encoder|reference"),
    (AR, r"\bar\b|talker|thinker|llm|language.?model|t2s|t3|predictor|prefill|decode|generation|execute|step"),
)


def component_of(stage: str, declared: Mapping[str, str]) -> str:
    """The branch of a stage: as the driver declared it, else by its name."""
    if stage in declared:
        return declared[stage]
    for component, words in _WORDS:
        if re.search(words, stage.lower().replace("_", " ")):
            return component
    return OTHER
