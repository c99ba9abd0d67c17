"""Stack drivers, ASR, statistics and the gate: real speech, judged end to end."""
