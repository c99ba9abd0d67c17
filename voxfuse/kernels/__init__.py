"""One operation per file: Triton kernels, launcher, envelope, and the upstream chain as reference."""
