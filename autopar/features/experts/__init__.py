"""Distribute the experts of a mixture over ranks, send tokens to them, and balance routers over all replicas."""

from autopar.registry import Feature, Step

FEATURE = Feature(
    name="experts",
    about="experts distributed over ranks and replicas, and the routers' loss over all replicas",
    names={"expert_load": "autopar.features.experts.layers:expert_load"},
    matches={"by_expert": "autopar.features.experts.plan:shard_by_expert"},
    rules={
        "experts": "autopar.features.experts.layers:stacked_experts",
        "expert_modules": "autopar.features.experts.module_experts:ModuleExperts",
        "calls_experts": "autopar.features.experts.module_experts:ExpertCaller",
    },
    steps={
        "balance_routers": Step(
            "autopar.features.experts.router_loss:balance_routers", after="watch_replicas", always=True
        ),
        "share_experts": Step("autopar.features.experts.replicas:share_experts", after="balance_routers"),
        "check_forwards": Step("autopar.features.experts.replicas:check_forwards", after="prepare_optimizer"),
    },
)
