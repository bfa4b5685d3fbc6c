"""What is verified: problems with checkable answers, graders, the shape of the reward."""
