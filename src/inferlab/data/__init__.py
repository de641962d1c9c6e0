"""Text corpora, labelled text and questions: reading, cleaning, splitting, windows, tasks."""
