"""Models on several ranks. One scheduler plans; all ranks execute the same plans.

    parts of a model   split (counting), shard (tensors), sampler; stages (pipeline);
                       experts, placement (counting), balance (expert parallelism)
    communication      communicator (and threads), shared_memory, sockets; pipes between stages;
                       device_groups (GPUs)
    a rank             place (topology), rank (model and runner), worker (process)
    the driver         executor (and threads), processes, rank_loop, rank_process, messages
    start-up           launch, groups (one machine); meeting, fingerprint (several); ray_ranks

Reading order: communicator, split, shard, sampler, place, executor, launch; then the rest.
"""
