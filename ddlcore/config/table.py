"""The table of the core's settings."""

from __future__ import annotations

from ddlcore.config.setting import Setting

CHILD_MARK = "DDL_INIT_PID"  # set for the child processes of a rank, which are not ranks themselves
# Variables that the launcher sets for its processes. They are not settings.
NOT_SETTINGS = frozenset(
    {
        CHILD_MARK,
        "DDL_ADDRESS",
        "DDL_AGENT",
        "DDL_ELASTIC",
        "DDL_HOST_INDEXES",
        "DDL_JOB_FILE",
        "DDL_LAUNCHED_BY",
        "DDL_RANK",
        "DDL_TIMELINE_DIR",
    }
)
SETTINGS: tuple[Setting, ...] = (
    Setting(
        "backend",
        str,
        "auto",
        "transport: auto; a name that `ddl info` lists; or two names such as shm+NAME, the first within hosts and the "
        "second across them. Exceptions for single operations may follow, such as auto,allgather=NAME",
        group="performance",
        brief="Transport that reduces tensors.",
    ),
    Setting(
        "device_dense",
        str,
        "auto",
        "what reduces tensors on accelerators: auto; the name of a transport; or cpu, which copies them to host memory "
        "and reduces them there",
        group="performance",
    ),
    Setting(
        "device_sparse",
        str,
        "auto",
        "what reduces sparse gradients on accelerators: auto, the same as device_dense; or cpu, which copies them to "
        "host memory and reduces them there",
        choices=("auto", "cpu"),
        group="performance",
    ),
    Setting(
        "fusion_bytes",
        int,
        8 << 20,
        "largest size of a bucket, in which several tensors are reduced together, in bytes; 0: each tensor alone",
        minimum=0,
        group="performance",
        brief="Largest bucket, in bytes.",
    ),
    Setting(
        "first_bucket_bytes",
        int,
        1 << 20,
        "in replay, largest size of the first and of the last bucket of a step, in bytes; 0: the same as fusion_bytes",
        minimum=0,
        group="performance",
    ),
    Setting(
        "overlap",
        str,
        "auto",
        "in replay, when buckets in host memory are reduced. on: while the step still computes; off: at the end of the "
        "step; auto: on across hosts or if a bucket size is set, else off, because on one host the reduction would "
        "take cores from the computation",
        choices=("auto", "on", "off"),
        group="performance",
    ),
    Setting(
        "replay",
        bool,
        True,
        "1: steps that repeat run without control messages; 0: every bucket is negotiated",
        group="performance",
    ),
    Setting(
        "control_address",
        str,
        "",
        "address at which the launcher listens for its ranks: tcp://IP:PORT, with port 0 for any free port; empty: a "
        "socket within this host, or a free port if there are several hosts",
        group="hosts",
    ),
    Setting(
        "network_interface",
        str,
        "",
        "network that the ranks use: an interface or an address; each host uses the first that it has of several, "
        "separated by commas; empty: the interface on the route to the launcher",
        group="hosts",
        brief="Network of the ranks, such as eth0.",
    ),
    Setting(
        "rendezvous_dir",
        str,
        "",
        "directory, shared by all hosts, where ranks that another launcher has started find each other; "
        "empty: SLURM_SUBMIT_DIR, else ~/.ddl",
        group="hosts",
    ),
    Setting(
        "launcher",
        str,
        "auto",
        "what starts ranks on other hosts: auto, or a name that `ddl info` lists",
        group="hosts",
    ),
    Setting("launcher_args", str, "", "more arguments for the program that starts ranks on other hosts", group="hosts"),
    Setting(
        "silence_s",
        float,
        3.0,
        "how long another host may be silent before its ranks count as lost, in seconds",
        minimum=1.5,
        group="faults",
    ),
    Setting(
        "compression",
        str,
        "none",
        "compression of float32 gradients if the script names none: none, fp16, bf16, or a plugin's",
        group="performance",
        brief="Send gradients as fp16 or bf16.",
    ),
    Setting(
        "autotune",
        bool,
        False,
        "1: search for better settings while training, and continue with the best",
        group="tuning",
        brief="Search for better settings while training.",
    ),
    Setting(
        "autotune_log", str, "", "CSV file with one line for each sample of the search; empty: none", group="tuning"
    ),
    Setting(
        "autotune_trials",
        int,
        20,
        "number of samples that the search takes before it compares the best settings",
        minimum=1,
        group="tuning",
    ),
    Setting(
        "autotune_steps",
        int,
        10,
        "number of steps that are measured for one sample; more are measured if they are very short",
        minimum=3,
        group="tuning",
    ),
    Setting(
        "autotune_warmup_steps",
        int,
        2,
        "number of steps after each change of settings that are not measured",
        minimum=0,
        group="tuning",
    ),
    Setting(
        "autotune_compression", bool, False, "1: the search may try compression, which changes values", group="tuning"
    ),
    Setting(
        "tuner",
        str,
        "auto",
        "search algorithm: bayes, grid or a plugin's; auto: bayes if it is installed",
        group="tuning",
    ),
    Setting("fusion_policy", str, "threshold", "policy that decides which tensors share a bucket", group="performance"),
    Setting(
        "start_timeout_s",
        float,
        60.0,
        "how long init waits for the other ranks, in seconds",
        minimum=0.1,
        group="faults",
    ),
    Setting(
        "open_timeout_s", float, 60.0, "how long opening a transport may take, in seconds", minimum=0.1, group="faults"
    ),
    Setting(
        "leave_timeout_s",
        float,
        10.0,
        "how long shutdown waits for announced buckets, in seconds",
        minimum=0.0,
        group="faults",
    ),
    Setting(
        "stall_warning_s",
        float,
        60.0,
        "how long a rank may wait for other ranks before a report, in seconds; the report names the tensors, the "
        "missing ranks, and whether these still answer; 0: no report",
        minimum=0,
        group="faults",
        brief="Report longer waits (seconds).",
    ),
    Setting(
        "stall_shutdown_s",
        float,
        0.0,
        "how long a rank may wait for other ranks before the job is ended, in seconds; every rank raises an error that "
        "says what waits for which ranks, and ranks that do not answer are killed; 0: the job is not ended",
        minimum=0,
        group="faults",
        brief="End a job that waits longer, in seconds.",
    ),
    Setting(
        "verify_every",
        int,
        0,
        "N: compare the ranks' parameters bit by bit after every N steps of an optimizer; "
        "a difference ends the job with ReplicasDiffer on every rank; 0: never",
        minimum=0,
        group="faults",
        brief="Compare the parameters every N steps.",
    ),
    Setting(
        "verify_first_step",
        bool,
        True,
        "after the first step of each optimizer, warn if the ranks' parameters differ: then the script probably lacks "
        "a broadcast_parameters or a DistributedOptimizer",
        group="faults",
    ),
    Setting(
        "join_average",
        str,
        "contributors",
        "by what an average is divided while some ranks have joined: by the number of ranks that contribute values, or "
        "by the size of the process set, as in Horovod",
        choices=("contributors", "size"),
        group="job",
    ),
    Setting(
        "stall_stacks",
        bool,
        False,
        "include in the report of a stall the Python stacks of the ranks that others wait for",
        group="faults",
    ),
    Setting(
        "flight_dir",
        str,
        "",
        "directory where each rank writes its last actions as JSON, if the job fails or stalls, or on flight_signal; "
        "empty: none",
        group="faults",
        brief="Write each rank's last actions if it fails.",
    ),
    Setting(
        "flight_records",
        int,
        1024,
        "how many of its last buckets and decisions each rank keeps for flight_dir; 0: none",
        minimum=0,
        group="faults",
    ),
    Setting(
        "flight_signal",
        str,
        "SIGUSR1",
        "with flight_dir, the signal on which a rank writes its file, unless the script handles it; empty: none",
        group="faults",
    ),
    Setting(
        "min_np",
        int,
        0,
        "elastic job: it goes on without ranks that are lost while at least N are left, and their processes are started "
        "again; 0: it ends with the first rank that fails",
        minimum=0,
        group="faults",
        brief="Go on with at least N ranks.",
    ),
    Setting(
        "max_np",
        int,
        0,
        "elastic job: the most ranks that it has at a time, if the hosts take so many; 0: as many as -np",
        minimum=0,
        group="faults",
    ),
    Setting(
        "host_discovery_script",
        str,
        "",
        "elastic job: a command that prints the hosts that there are now, one a line: HOST:SLOTS, or HOST. It is run once a "
        "second; hosts may come and leave",
        group="faults",
    ),
    Setting(
        "slots_per_host",
        int,
        1,
        "elastic job: how many ranks a host takes for which host_discovery_script prints no number",
        minimum=1,
        group="faults",
    ),
    Setting(
        "host_discovery",
        str,
        "",
        "elastic job: what says which hosts there are now: script, slurm or that of a plugin; empty: the hosts are fixed",
        group="faults",
    ),
    Setting(
        "evict_after_s",
        float,
        0.0,
        "elastic job: the other ranks go on without a rank for which they have waited so long, in seconds; it is killed, and "
        "started again; 0: they wait",
        minimum=0,
        group="faults",
    ),
    Setting(
        "host_cooldown_s",
        str,
        "60 600",
        "elastic job: how long a host is left out after it was lost or its ranks have failed too often, in seconds: after "
        "the first time, and the longest; the time doubles with each failure",
        group="faults",
    ),
    Setting(
        "launcher_loss",
        str,
        "continue",
        "elastic job on several hosts: what happens when the launcher or its host is lost: continue, under a successor on "
        "another host, if more than half of the ranks are left; or end",
        choices=("continue", "end"),
        group="faults",
    ),
    Setting(
        "elastic_timeout_s",
        float,
        600.0,
        "elastic job: how long ranks wait for others while there are fewer than min_np, in seconds",
        minimum=0.1,
        group="faults",
    ),
    Setting(
        "reset_limit",
        int,
        0,
        "elastic job: how often the ranks may form a new world after the first one; 0: any number of times",
        minimum=0,
        group="faults",
    ),
    Setting(
        "restarts",
        int,
        3,
        "elastic job: how often the process of one rank is started again within ten minutes: at once after a signal, "
        "then after 1, 2, 4, … times restart_delay_s; then its host is left out for host_cooldown_s",
        minimum=0,
        group="faults",
    ),
    Setting(
        "restart_delay_s",
        float,
        1.0,
        "elastic job: how long the second start of a rank's process waits, in seconds; each further one waits twice as long",
        minimum=0.0,
        group="faults",
    ),
    Setting(
        "stop_signals",
        str,
        "SIGTERM,SIGUSR1",
        "signals after which should_stop() becomes true on all ranks at the same step, if the script calls it and does not "
        "handle the signal itself; empty: none",
        group="faults",
    ),
    Setting(
        "profiler_ranges",
        bool,
        False,
        "show each bucket by its name in the framework's own profiler, on the thread that reduces it",
        group="output",
    ),
    Setting(
        "grace_s",
        float,
        5.0,
        "how long the other ranks may continue after a rank has failed, in seconds; then they are ended",
        minimum=0,
        group="faults",
    ),
    Setting(
        "log_level",
        str,
        "WARNING",
        "lowest level that is logged: DEBUG, INFO, WARNING or ERROR",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        group="output",
        brief="Lowest level that is logged.",
    ),
    Setting(
        "cache_dir",
        str,
        "",
        "directory for compiled kernels; empty: the first of the usual cache directories that is writable",
        group="performance",
    ),
    Setting(
        "switch_interval_ms",
        float,
        0.0,
        "thread switch interval of the Python interpreter while a job runs, in ms; 0: unchanged",
        minimum=0,
        group="performance",
    ),
    Setting(
        "torch_env",
        bool,
        True,
        "0: do not set RANK, WORLD_SIZE, MASTER_ADDR and the others of torchrun's variables for the ranks; then "
        "transformers' Trainer and Accelerate do not distribute the training themselves",
        group="job",
    ),
    Setting(
        "rank_variables",
        str,
        "",
        "NAME=FACT,…: further variables of ranks; FACT: rank, size, local_rank, local_size, cross_rank, cross_size, address",
        group="job",
    ),
    Setting(
        "plugins",
        str,
        "",
        "comma-separated names of the only plugins to load; empty: all that are installed",
        group="job",
    ),
    Setting("plugins_off", str, "", "comma-separated names of plugins not to load", group="job"),
)
