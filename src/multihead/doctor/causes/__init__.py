"""Every known mistake; where several explain an output equally well, the earlier is named first."""

from multihead.doctor.causes import mask, merge, precision, project, score, split

KNOWN = (*project.CAUSES, *split.CAUSES, *score.CAUSES, *precision.CAUSES, *mask.CAUSES, *merge.CAUSES)
