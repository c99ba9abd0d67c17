"""The micro judge: paired timing, measured ceilings, and the verdict of one fusion at one shape."""
