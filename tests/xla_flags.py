"""XLA's flags for programs that compile once and run a few times, to set in the environment before JAX starts."""

# One thread for each program's kernels: test workers and pages share the cores.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
# Compiling takes most time. Without LLVM's optimizations the suite takes a third less; without the new emitters of
# fused loops and of tiles, on JAX 0.10, another third of the rest (0.12 ignores these options). A single LLVM module
# for each program, with narrow vectors, saves a tenth of the time of compiling.
SHORT_COMPILATION = (
    f"{ONE_THREAD} --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_prefer_vector_width=128 "
    "--xla_backend_extra_options=xla_cpu_disable_tiled_emitter=true,xla_cpu_disable_new_fusion_emitters=true"
)
