# An environment for reinforcement learning (docs/environments.md): the model guesses the number `answer` of the record in several turns.
#   command = ["awk", "-f", "scripts/guess-environment.awk"], batch_size = 1
# A right guess is rewarded with 1, and ends the conversation. A wrong guess is answered with "higher" or "lower".
function number_after(key,    rest) {  # The number after `key` in the line, which may be in quotes.
    rest = substr($0, index($0, key) + length(key))
    sub(/^[ "]+/, "", rest)
    return rest + 0
}
{
    guess = number_after("\"completion\":"); answer = number_after("\"answer\":")
    step = guess == answer ? "{\"done\": true, \"reward\": 1}" \
        : "{\"done\": false, \"message\": \" " (guess < answer ? "higher" : "lower") " \", \"reward\": 0}"
    print "{\"id\": " number_after("\"id\":") ", \"steps\": [" step "]}"
    fflush()
}
