"""The benchmark of the memory prediction: what it says of a step beside what a GPU then takes."""
