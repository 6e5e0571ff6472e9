"""The head that LAION's aesthetic predictor and ImageReward share."""

from torch import nn

WIDTHS = (1024, 128, 64, 16, 1)
DROPOUT = (0.2, 0.2, 0.1)


class LinearHead(nn.Module):
    """Linear layers of 1024, 128, 64, 16 and 1, with dropout and no activations between.

    Published so; without dropout it is one linear map. The parameters are called ``layers.<n>``.

    Parameters
    ----------
    width : int
        Of the features that it reads.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index, (before, after) in enumerate(zip((width, *WIDTHS), WIDTHS, strict=False)):
            layers.append(nn.Linear(before, after))
            if index < len(DROPOUT):
                layers.append(nn.Dropout(DROPOUT[index]))
        self.layers = nn.Sequential(*layers)
