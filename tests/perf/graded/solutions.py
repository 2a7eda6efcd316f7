"""Right answers to the code tasks that ship."""


def roman(number):
    signs = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL")]
    text = ""
    for value, sign in [*signs, (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]:
        text += sign * (number // value)
        number %= value
    return text


def merge(spans):
    found = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def balanced(text):
    pairs, opened = {")": "(", "]": "[", "}": "{"}, []
    for sign in text:
        if sign in pairs.values():
            opened.append(sign)
        elif sign in pairs and (not opened or opened.pop() != pairs[sign]):
            return False
    return not opened


def runs(values):
    found = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1] + 1)
        else:
            found.append((value, 1))
    return found


def fewest(coins, amount):
    best = [0] + [amount + 1] * amount
    for total in range(1, amount + 1):
        best[total] = min([best[total - coin] + 1 for coin in coins if coin <= total], default=amount + 1)
    return best[amount] if best[amount] <= amount else -1


def to_base(number, base):
    if number < 0:
        return "-" + to_base(-number, base)
    digit = "0123456789abcdef"[number % base]
    return digit if number < base else to_base(number // base, base) + digit


def rotate(grid):
    return [list(row) for row in zip(*grid[::-1], strict=True)]


def order(needs):
    done, open_tasks = [], set()

    def visit(task):
        if task in done:
            return
        if task in open_tasks:
            raise ValueError(task)
        open_tasks.add(task)
        for before in needs.get(task, []):
            visit(before)
        done.append(task)

    for task in needs:
        visit(task)
    return done


def evaluate(text):
    signs = [sign for sign in text if sign != " "]

    def atom():
        if signs[0] == "(":
            signs.pop(0)
            value = total()
            signs.pop(0)
            return value
        digits = ""
        while signs and signs[0].isdigit():
            digits += signs.pop(0)
        return int(digits)

    def product():
        value = atom()
        while signs and signs[0] == "*":
            signs.pop(0)
            value *= atom()
        return value

    def total():
        value = product()
        while signs and signs[0] in "+-":
            value += product() if signs.pop(0) == "+" else -product()
        return value

    return total()


def medians(values):
    found = []
    for count in range(1, len(values) + 1):
        known = sorted(values[:count])
        half = count // 2
        found.append(known[half] if count % 2 else (known[half - 1] + known[half]) / 2)
    return found
