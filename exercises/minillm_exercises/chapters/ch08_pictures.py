"""Chapter 08: the picture of a token budget."""

from minillm_exercises.errors import ExerciseError
from minillm_exercises.plots import bars, bound, figure, show


def shares(prompt: int, chats: int, budget: int) -> list[int]:
    """Tokens of the prompt in each step, while every one of `chats` gets a token first.

    Raises:
        ExerciseError: the budget leaves no token for the prompt.
    """
    room = budget - chats
    if room < 1:
        raise ExerciseError(f"A budget of {budget} leaves no token for a prompt beside {chats}.")
    return [min(room, prompt - start) for start in range(0, prompt, room)]


def draw_shares(prompt: int, chats: int, budget: int) -> None:
    """Draw the tokens of every step while a prompt joins `chats`, without and with a budget."""
    fig, axes = figure("step", "tokens of the step", cols=2, size=(8, 3.4))
    panels = {
        "without a budget": [0, prompt, *[0] * len(shares(prompt, chats, budget))],
        f"with a budget of {budget} tokens": [0, *shares(prompt, chats, budget), 0],
    }
    for ax, (title, pieces) in zip(axes, panels.items(), strict=True):
        steps = range(1, len(pieces) + 1)
        ax.bar(steps, [chats] * len(pieces), 0.7, label="chats, one token each", **bars(0))
        ax.bar(steps, pieces, 0.7, bottom=chats, label="prompt", **bars(1))
        for step, piece in zip(steps, pieces, strict=True):
            words = f"{chats} + {piece}" if piece else f"{chats}"
            ax.text(step, chats + piece + 0.3, words, ha="center")
        ax.set(title=title, ylim=(0, 1.15 * (prompt + chats)), xticks=list(steps))
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.grid(visible=False, axis="x")
    bound(axes[1], [0.5, len(pieces) + 0.5], [budget] * 2, "the budget", side="above", at=1.0)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2)
    needed = len(shares(prompt, chats, budget))
    show(
        fig,
        f"A prompt of {prompt} tokens joins {chats} chats in step 2. Without a budget one step "
        f"computes {chats + prompt} tokens; with a budget of {budget} the prompt takes {needed} "
        f"steps, and no step is larger than {budget} tokens.",
    )
