"""`vllm bench serve` where the `vllm` command does not start: vLLM's CPU build looks for a distribution named vllm."""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
