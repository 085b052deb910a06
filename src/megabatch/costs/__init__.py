"""Memory and seconds of one training step, predicted by counting, without the device.

Memory: `memory.predict_memory` runs one step on fake tensors, follows every storage, and replays the allocations through a model of
CUDA's caching allocator.

Time: `counting.count_work` lists the operations of an encoder with their FLOPs and bytes, `operations` sorts them into classes of
similar efficiency, `devices` and `hardware` say what a machine can do, and `time.step_time` divides one by the other.

`memory.PeakMemory` and `time.step_time` answer for a `strategy.Strategy`: how a batch is split over ranks and chunks. Nothing here
knows about plans.
"""
