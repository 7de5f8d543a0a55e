"""Estimators of per-prompt pass rates and mean rewards, and the tracker that combines and stores them."""
