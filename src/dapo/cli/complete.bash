# Completes dapo in bash: dapo completion bash >> ~/.bashrc
_dapo() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\n'
    local word="${line##*[[:space:]]}"
    local before="${word%"${word##*[$COMP_WORDBREAKS]}"}"  # bash replaces only what follows a break such as =
    COMPREPLY=($("$1" completion bash --line "$line" 2>/dev/null | cut -f 1))
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[./=] ]]; then
        compopt -o nospace
    fi
}
complete -o default -F _dapo dapo
