"""Work split over the cores of this process."""
