/* The functions of a CUDA driver that torch and Triton need while loading: they report no GPU and no active context. */
int cuInit(unsigned flags) { return 100; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no driver"; return 0; }
