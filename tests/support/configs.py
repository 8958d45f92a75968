"""Forces the configs of an op in turn; lists the kernels that its default plans compile."""

from tilewright.launch import Device, forced_config

ROWS = (*range(1, 34), 63, 64, *range(65, 3000, 61))  # of decode steps and of prompts all remainders of 16


def forced_each(op, configs):
    """Yields each config once; it is forced during the caller's loop body."""
    for config in dict.fromkeys(configs):
        with forced_config(op.plan, config):
            yield config


def configs_everywhere(op, problem):
    """All configs of a CPU, the default and the last of an H200, and the default of an RTX 5090."""
    h200 = op.space(problem, Device.named("H200"))
    return [*op.space(problem, Device.named("CPU")), h200[0], h200[-1], op.space(problem, Device.named("RTX5090"))[0]]


def compiled_kernels(op, problems, device):
    """Kernel, constants and hints of every launch of these problems' default plans."""
    found = set()
    for problem in problems:
        found.update(launch.compiled for launch in op.plan(problem, op.space(problem, device)[0], device))
    return found


def interpreted(op, problem, config):
    """What of a config the interpreter can tell apart."""
    main = op.plan(problem, config, Device.named("CPU"))[0]
    return main.name, main.grid, str({name: value for name, value in main.constants.items() if name != "latency"})
