#compdef dapo
# Completes dapo in zsh: dapo completion zsh > ~/.zfunc/_dapo, with ~/.zfunc in fpath before compinit
_dapo() {
    local -a words_open words_whole about_open about_whole
    local word about
    while IFS=$'\t' read -r word about; do
        if [[ $word == *[./=] ]]; then
            words_open+=("$word") about_open+=("$word${about:+  $about}")
        else
            words_whole+=("$word") about_whole+=("$word${about:+  $about}")
        fi
    done < <($words[1] completion zsh --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)
    if (( ! $#words_open && ! $#words_whole )); then
        _files
        return
    fi
    compadd -l -S '' -d about_open -a -- words_open
    compadd -l -d about_whole -a -- words_whole
}
if [[ $funcstack[1] == _dapo ]]; then
    _dapo "$@"
else
    compdef _dapo dapo
fi
