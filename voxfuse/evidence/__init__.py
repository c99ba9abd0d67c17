"""The evidence room: the ledger of verdicts, and what they allow to be turned on."""
