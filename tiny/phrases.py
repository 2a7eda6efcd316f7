"""What people ask and say in the tiny model's dialogues: forms of questions, systems' words, small talk.

In a question `{n}` is the name asked for, `{k}` its kind, `{a}` that kind's article, `{s}` a statement about it.
"""

FUNCTION_QUESTIONS = (
    "What does the {n} {k} do?",
    "What does {n} do?",
    "What does `{n}` do in Python?",
    "Explain the {n} {k}.",
    "How does {n}() work?",
    "Tell me about the {n} {k}.",
    "What is {n} for?",
    "Describe {n}.",
    "what does {n} do",
    "What does {n}() do?",
    "Can you explain what {n} does?",
    "I found {n}() in some code. What does it do?",
    "Please explain {n}.",
    "What is the {n} {k}?",
    "What does the {k} `{n}` do?",
    "what is {n}",
    "What is the purpose of {n}?",
    "When would I use {n}?",
    "In Python, what does {n} do?",
    "Give me a short description of {n}.",
    "What does the function {n}() do?",
    "Hi! What does the {n} {k} do?",
    "What does the Python {k} {n} do?",
    "explain {n}",
    "What happens when I call {n}()?",
)
CLASS_QUESTIONS = (
    "What is {n}?",
    "What is the {n} {k}?",
    "What is the {k} {n} for?",
    "Explain {n}.",
    "Describe the {n} {k}.",
    "Tell me about {n}.",
    "What does {n} stand for?",
    "what is {n}",
    "When is {n} used?",
    "What is `{n}` in Python?",
)
MODULE_QUESTIONS = (
    "What is the {n} module?",
    "What is the {n} module for?",
    "What does the {n} module do?",
    "Describe the {n} module.",
    "What can I do with the {n} module?",
    "Tell me about the module {n}.",
    "What is {n}?",
    "Explain the {n} module.",
    "what does the module {n} provide",
    "Why would I import {n}?",
    "What does `import {n}` give me?",
    "what is {n}",
)
TERM_QUESTIONS = (
    "What is {a} {n}?",
    "What does {n} mean in Python?",
    "Define {n}.",
    "Explain the term {n}.",
    "what is {a} {n}",
    "What does the term {n} mean?",
    "What do you call {a} {n} in Python?",
    "Tell me what {a} {n} is.",
    "What is {n}?",
)
SIGNATURE_QUESTIONS = (
    "How do I call {n}?",
    "What arguments does {n} take?",
    "What is the signature of {n}?",
    "Show me how {n} is called.",
)
REVERSE_QUESTIONS = ("Which Python {k} {s}?", "Which {k} {s}?", "Name the {k} that {s}.", "What {k} {s}?")
SYSTEMS = (
    "You are a helpful assistant.",
    "You answer questions about Python.",
    "Answer briefly.",
    "You are a friendly assistant that explains Python.",
    "Be concise and correct.",
)
SMALL_TALK = (
    (
        ("Hello!", "Hi", "Hello", "hello there", "Hey!", "Hi there!", "Good morning", "Good evening!"),
        "Hello! How can I help you with Python today?",
    ),
    (
        ("Who are you?", "What are you?", "who are you", "Tell me about yourself.", "What is your name?"),
        "I am the tiny language model that ships with duovolt. I was trained on Python's documentation.",
    ),
    (("Thanks!", "Thank you.", "thanks", "Thank you very much!", "Great, thanks."), "You are welcome!"),
    (("Bye", "Goodbye!", "See you later.", "Good night!"), "Goodbye! Have a nice day."),
    (
        ("How are you?", "How are you today?", "how are you", "How is it going?"),
        "I am fine, thank you. What would you like to know?",
    ),
    (
        ("What can you do?", "How can you help me?", "What do you know?", "Help", "help me"),
        "I can answer short questions about Python's functions, modules and terms.",
    ),
    (
        ("What is Python?", "what is python", "Tell me about Python.", "Describe the Python language."),
        "Python is an interpreted, interactive, object-oriented programming language. It has modules, exceptions, dynamic "
        "typing, high level data types and classes.",
    ),
    (("Are you a human?", "Are you a person?", "Are you an AI?"), "No, I am a small language model."),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
        "Why did the programmer leave the party? The code was not finished.",
    ),
)
