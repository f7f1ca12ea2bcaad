"""The vocabulary of the corpus: names, creatures, places, things. Plain lists, no logic."""


def _split(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.replace("\n", " ").split(",") if word.strip())


GIRLS = _split("""Mia, Lily, Anna, Emma, Nora, Ella, Rosa, Clara, Ivy, Ruby, Maya, Zoe, Lucy, Alice, Sara, Hana,
Lena, Tara, Nina, Olga, Amina, Leila, Priya, Yuki, Mei, Sofia, Elena, Freya, Greta, Ingrid, Kate, Jane, Mary, Grace,
Hope, Daisy, Poppy, Hazel, Willow, Olive, Bella, Stella, Luna, Cora, Dora, Flora, Iris, June, Molly, Penny, Tilly,
Wendy""")
BOYS = _split("""Tom, Ben, Sam, Max, Leo, Jack, Finn, Noah, Adam, Paul, Peter, Oscar, Hugo, Felix, Theo, Otto,
Emil, Karl, Omar, Ali, Ravi, Kenji, Chen, Diego, Luis, Marco, Ivan, Nils, Lars, Henry, George, Arthur, Charlie,
Billy, Danny, Eddie, Frank, Jim, Joe, Luke, Mark, Ned, Oliver, Robin, Simon, Toby, Victor, Walter, Will, David,
Daniel, James""")
PET_NAMES = _split("""Pip, Tuck, Bramble, Clover, Pebble, Rusty, Dusty, Misty, Nutmeg, Pepper, Ginger, Button,
Biscuit, Waffle, Maple, Acorn, Fern, Moss, Thistle, Juniper, Ember, Ash, Flicker, Spark, Comet, Star, Sunny, Breeze,
Storm, Snow, Frost, Icicle, River, Ripple, Bubble, Coral, Shelly, Sandy, Rocky, Cliff, Hill, Whisper, Echo, Tumble,
Bounce, Hop, Skip, Zip, Dot, Patch, Spot, Stripe, Fuzzy, Fluff, Bobo, Momo, Kiki, Lulu, Nono, Tiko, Rolo, Milo,
Bilbo, Gus, Fergus""")
OTHER_NAMES = _split("""Aaron, Abby, Ahmed, Alex, Amy, Andy, Angela, Barbara, Boris, Carla, Carlos, Chris, Cindy,
Claire, Dmitri, Donna, Eric, Erik, Eva, Fatima, Fred, Gabriel, Hannah, Harry, Helen, Ian, Isabel, Jacob, Jason,
Jenny, John, Jonas, Jordan, Juan, Julia, Karen, Kevin, Kim, Laura, Linda, Liam, Lisa, Maria, Martin, Matt, Michael,
Mike, Mohammed, Natalie, Nick, Pablo, Pedro, Rachel, Rita, Robert, Ryan, Sandra, Sean, Steve, Susan, Thomas, Tim,
Tony, Vera, Wang, William, Xavier, Yusuf, Zara, Bob, Dave, Ana, Jan, Sven, Taro, Aisha, Kofi, Ngozi, Bo, Li, Raj,
Anil, Sunita""")

FOREST_FOLK = _split("""fox, bear, rabbit, hedgehog, squirrel, owl, deer, mouse, badger, mole, wolf, frog, raccoon,
beaver, otter, hare, robin, woodpecker, snail, beetle, butterfly, ladybug, bee, ant, caterpillar, bat, weasel,
moose, lynx, toad""")
FARM_FOLK = _split("""cat, dog, pig, cow, horse, goat, sheep, lamb, hen, rooster, duck, goose, donkey, pony,
kitten, puppy, calf, piglet, chick, turkey, duckling""")
SEA_FOLK = _split("""fish, dolphin, whale, turtle, crab, octopus, seal, penguin, seagull, starfish, seahorse,
shark, mermaid, lobster, jellyfish, pelican, walrus, clam, sea otter, snow crab, polar bear""")
WILD_FOLK = _split("""lion, elephant, giraffe, monkey, tiger, zebra, hippo, parrot, crocodile, camel, kangaroo,
koala, panda, rhino, cheetah, leopard, gorilla, peacock, snake, lizard, meerkat, sloth, toucan, flamingo, ostrich,
chameleon""")
MAGIC_FOLK = _split("""dragon, unicorn, fairy, wizard, witch, giant, elf, dwarf, troll, ghost, gnome, goblin,
knight, princess, prince, king, queen, phoenix, griffin, monster, snowman, genie, vampire""")
TOWN_FOLK = _split("""baker, painter, sailor, fisherman, tailor, clockmaker, gardener, teacher, farmer, shepherd,
postman, doctor, cook, musician, carpenter, librarian, miner, pilot, clown, astronaut, pirate, inventor, lighthouse
keeper, robot, scarecrow, puppet, doll, teddy bear, train driver, chimney sweep, detective, firefighter, blacksmith,
programmer, engineer, scientist, ninja, cowboy, magician, dancer, singer, student, explorer""")
THING_FOLK = _split("""cloud, star, little boat, paper plane, teapot, lantern, kite, snowflake, leaf, pumpkin,
clock, pencil, umbrella, bicycle, tractor, train, raindrop, pebble, candle, tree, flower, seed, spoon, button, sock,
red balloon, toaster, computer, mountain, river, moon, pancake, potato, banana, carrot, apple, book, key, shoe, hat""")

SMALL = _split("""small, little, tiny, young, clever, shy, brave, kind, curious, gentle, cheerful, quiet, lonely,
sleepy, hungry, proud, playful, careful, funny, busy, patient, friendly, lazy, old, white, brown, grey, red, green,
blue, golden, black, grumpy, happy, sad, polite, noisy, wise, silly, fluffy, skinny, round, strong, fast, slow,
dreamy, merry, honest""")

TREASURES = _split("""red ball, blue kite, silver bell, golden key, wooden whistle, yellow scarf, green hat, little
drum, glass marble, paper boat, warm blanket, toy train, music box, shiny stone, old map, brass compass, picture
book, straw hat, wooden spoon, small lantern, feather pen, pocket watch, tin cup, woolly sock, purple button, string
of beads, seashell, walking stick, tiny mirror, striped umbrella, lucky coin, honey jar, silk ribbon, toy boat, snow
globe, old flute, leather boot, birthday card, bright lamp, wooden horse""")
FOODS = _split("""apple pie, honey cake, carrot soup, berry jam, warm bread, cheese toast, nut cookies, pumpkin soup,
pancakes, plum tart, mushroom stew, sweet corn, hot porridge, cherry pie, oat biscuits, potato soup, pear cake,
blueberry muffins, ginger bread, rice pudding, noodle soup, roasted chestnuts, lemon cake, strawberry jam""")
FRUIT = _split(
    """apples, berries, pears, plums, cherries, nuts, grapes, peaches, figs, acorns, mushrooms, strawberries"""
)
