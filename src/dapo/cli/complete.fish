# Completes dapo in fish: dapo completion fish > ~/.config/fish/completions/dapo.fish
function __dapo_complete
    set -l found (dapo completion fish --line (commandline --current-process --cut-at-cursor | string collect) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path (commandline --current-token)
    end
end
complete --command dapo --no-files --arguments '(__dapo_complete)'
