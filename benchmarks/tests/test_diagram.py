from ada_trl import AdaGRPOConfig
from benchmarks.analyses import diagram
from benchmarks.common import DEFAULT


def test_the_diagram_shows_the_defaults(tmp_path):
    args = AdaGRPOConfig(str(tmp_path), per_device_train_batch_size=8, use_cpu=True, bf16=False)
    assert {name: getattr(args, name) for name in DEFAULT} == DEFAULT
    assert (diagram.M, diagram.N, diagram.GROUP) == (args.samples_per_round, args.max_rounds, args.num_generations)
